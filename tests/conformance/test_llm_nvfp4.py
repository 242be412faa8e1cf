"""A language model in NVFP4 on a CPU, without torch: token for token what eager says with the same rounded values."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.language_models import make_model, round_inputs
from tests.conformance.test_llm_int4_experts import check_tokens
from untorch.export import causal_lm
from untorch.quant import NVFP4Linear, NVFP4MoE, quantize

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["Qwen3", "Qwen3Moe", pytest.param("GptOss", marks=pytest.mark.exhaustive)])
def test_tokens_of_generate(name: str, tmp_path: Path) -> None:
    model: Any = make_model(name)
    path = tmp_path / "m.pt2"
    report = causal_lm(model, path, token_counts=(16,), quantize="nvfp4", progress=False)
    [method] = report.methods.values()
    assert "aoti_torch_cpu_nvfp4_int8_linear" in method.operators
    assert "aoti_torch_cpu_nvfp4_linear" not in method.operators
    rounded = copy.deepcopy(model)
    quantize(rounded, "nvfp4", progress=False)
    assert any(isinstance(part, NVFP4Linear) for part in rounded.modules())
    if name != "Qwen3":
        assert "aoti_torch_cpu_nvfp4_moe" in method.operators
        assert any(isinstance(part, NVFP4MoE) for part in rounded.modules())
    round_inputs(rounded)
    check_tokens(path, rounded, model)
