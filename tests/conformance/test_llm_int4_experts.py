"""Mixtures of experts in int4, in a process without torch: token for token what eager says with the same weights."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.language_models import greedy, make_model, round_inputs
from untorch.export import causal_lm
from untorch.quant import Int4Experts, quantize

pytestmark = pytest.mark.filterwarnings("ignore")

NEW = 10
PROMPTS = [[3, 7, 1, 9, 30, 11], list(range(40, 70)), [5], [9, 9, 8, 2, 4, 60, 61], list(range(80, 99)), [17, 3]]

RUN = """
import json, sys
sys.modules["torch"] = None
from untorch.llm import Engine, SamplingParams
job = json.load(sys.stdin)
greedy = SamplingParams(temperature=0, max_tokens=job["new"], ignore_eos=True)
with Engine(job["path"], max_batch_tokens=16, max_sequences=8, text=False) as engine:
    together = [r.token_ids for r in engine.generate(job["prompts"], greedy)]
    alone = [engine.generate(p, greedy).token_ids for p in job["prompts"]]
print(json.dumps([together, alone]))
"""


def check_tokens(path: Path, rounded: Any, model: Any) -> None:
    """Without torch the package gives the tokens of ``rounded``, together and alone, which are not the model's."""
    job = {"path": str(path), "prompts": PROMPTS, "new": NEW}
    python = os.environ.get("UNTORCH_RUN_PYTHON", sys.executable)
    done = subprocess.run([python, "-c", RUN], input=json.dumps(job), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [greedy(rounded, prompt, NEW) for prompt in PROMPTS]
    assert json.loads(done.stdout) == [expected, expected]
    assert expected != [greedy(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "integers"),
    [("Qwen3Moe", True), pytest.param("Qwen3Moe", False, marks=pytest.mark.exhaustive), pytest.param("GptOss", True, marks=pytest.mark.exhaustive),
     pytest.param("DeepseekV3", True, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_tokens_of_generate(name: str, integers: bool, tmp_path: Path) -> None:
    model: Any = make_model(name)
    options = {"dtype": "int4", "group_size": 32, "method": "rtn"}
    path = tmp_path / "m.pt2"
    report = causal_lm(
        model, path, token_counts=(16,), quantize=options, progress=False, int8_activations=None if integers else False
    )  # fmt: skip
    [method] = report.methods.values()
    assert "aoti_torch_cpu_int4_moe" in method.operators
    assert method.quantization is not None
    names = [layer.names[0] for layer in method.quantization.layers]
    assert any(layer.endswith("experts.gate_up_proj") for layer in names)
    assert any(layer.endswith("experts.down_proj") for layer in names)
    rounded = copy.deepcopy(model)
    quantize(rounded, "int4", group_size=32, method="rtn", progress=False)
    assert any(isinstance(part, Int4Experts) for part in rounded.modules())
    if integers:
        round_inputs(rounded)
    check_tokens(path, rounded, model)
