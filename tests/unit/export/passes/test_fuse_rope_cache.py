"""Tests of fuse_rope_cache: which models' rotations become one kernel, values, and why others stay."""

from __future__ import annotations

import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pass_graphs import close, targets
from torch import nn
from torch.utils._pytree import tree_map

from tests.conformance.language_models import make_model
from untorch.export import causal_lm
from untorch.export.lm.step import Step
from untorch.export.lm.step_methods import step_method
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.fuse_rope_cache import fuse_rope_cache
from untorch.export.passes.merge_linears import merge_linears
from untorch.export.passes.paged_attention_kernels import paged_attention_kernels
from untorch.export.passes.report import PassReport
from untorch.export.passes.table import PASSES

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore")


def fused(model: nn.Module, merges: bool = False) -> tuple[torch.fx.GraphModule, PassReport]:
    """A step with the kernels of GPUs, which gives the logits and the pool that it gave before."""
    given = step_method(Step(model, 16), 12)
    args, kinds = given["args"], {torch.float32: 1e-4, torch.bfloat16: 5e-2}
    with torch.no_grad():
        module: Any = torch.export.export(
            given["model"], args, dynamic_shapes=given["dynamic_shapes"], strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        ).module()  # fmt: skip
        paged_attention_kernels(module, "sm_90")
        first, second = (tree_map(torch.clone, args) for _ in range(2))
        expected = module(*first)
        report = fuse_rope_cache(module)
        drop_dead_code(module)
        if merges:
            assert merge_linears(module).changed
        close(module)
        found = module(*second)
    tolerance = kinds[args[7].dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
    pool, wanted = second[7].float(), first[7].float()
    torch.testing.assert_close(pool, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
    assert float(wanted.abs().max()) > 0
    return module, report


def calls(module: torch.fx.GraphModule) -> list[dict[str, Any]]:
    """The operator's arguments."""
    from untorch.export.passes.calls import arguments_of
    from untorch.ops.attention.rope_operator import OPERATOR

    return [arguments_of(node) for node in module.graph.nodes if node.target == OPERATOR]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "norms", "interleaved", "rotary"),
    [
        ("Llama", False, False, None), ("Qwen3", True, False, None), ("Phi3", False, False, None),
        ("Glm4", False, True, 0.5), ("Phi", False, False, 0.5),
    ],
)  # fmt: skip
def test_rotations_of_models(name: str, norms: bool, interleaved: bool, rotary: float | None) -> None:
    module, report = fused(make_model(name))
    found = calls(module)
    assert len(found) == len(report.changed) > 1 and not report.skipped
    for given in found:
        assert (given["q_weight"] is not None) == (given["k_weight"] is not None) == norms
        assert given["interleaved"] == interleaved
        width = given["q"].meta["val"].shape[2]
        assert given["cos"].meta["val"].shape[-1] == int(width * (rotary or 1))
        if norms:
            assert given["eps"] == 1e-6
    # The tables are made once for all layers, and nothing of the old way is left.
    assert len({given["cos"] for given in found}) == 1
    assert targets(module).count("untorch.computed_once") == 2
    assert targets(module).count("neg") == 0


@pytest.mark.slow
def test_the_norm_of_gemma_3() -> None:
    """1 + weight, in float32."""
    module, report = fused(make_model("Gemma3"))
    assert len(report.changed) == len(calls(module)) > 1
    assert all(given["q_weight"] is not None for given in calls(module))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_merged_linears(dtype: torch.dtype) -> None:
    module, report = fused(make_model("Qwen3").to(dtype), merges=True)
    assert report.changed
    for given in calls(module):
        strides = [given[part].meta["val"].stride() for part in "qkv"]
        assert len({stride[0] for stride in strides}) == 1  # of one result: no copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Olmo2", "q: {} is neither a weight of a head nor a table of all tokens"),
        ("GPT2LMHead", "q: it has 0 tables and 0 weights, and a rotation has 2 and at most 1"),
    ],
)
def test_what_stays(name: str, text: str) -> None:
    module, report = fused(make_model(name))
    assert not report.changed and not calls(module)
    [reason] = {
        reason.replace(reason.split()[1], "{}") if "{}" in text else reason for reason in report.skipped.values()
    }
    assert reason == text


@pytest.mark.slow
def test_values_decide() -> None:
    """Operators of a rotation that compute something else."""
    model = make_model("Llama")

    class Scaled(nn.Module):
        def __init__(self, linear: nn.Module) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 1.5

    model.model.layers[0].self_attn.q_proj = Scaled(model.model.layers[0].self_attn.q_proj)
    _, report = fused(model)
    assert len(report.changed) == len(model.model.layers) - 1
    assert list(report.skipped.values()) == [
        "q: its values are not those of an RMSNorm of each head and a rotary embedding"
    ]


@pytest.mark.slow
def test_other_operators_stay() -> None:
    """Values within the bound would not show it."""
    model = make_model("Llama")

    class Clipped(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).clamp(-100, 100)

    model.model.layers[0].self_attn.k_proj.__class__ = Clipped
    _, report = fused(model)
    assert list(report.skipped.values()) == ["k: clamp is no part of a norm and a rotation"]


@pytest.mark.slow
def test_the_kernels_of_a_layer(tmp_path: Path) -> None:
    """What a package for GPUs launches: decision 0047 has the list."""
    report = causal_lm(
        make_model("Qwen3").to(torch.bfloat16), tmp_path / "m.pt2", device="cuda", arch="sm_90", token_counts=(16,),
        keep_sources=True, progress=False,
    )  # fmt: skip
    layers = len(next(p.changed for p in report.methods["step_16"].passes if p.name == "fuse_rope_cache"))
    with zipfile.ZipFile(report.path) as archive:
        [name] = [n for n in archive.namelist() if "/step_16/" in n and n.endswith(".wrapper.cpp")]
        text = archive.read(name).decode()
    body = text[text.index("run_impl(") :]
    launched = [
        re.sub(r"_?\d+$", "", kernel).removeprefix("aoti_torch_cuda_")
        for kernel in re.findall(r"^    (?:call_|AOTI_TORCH_ERROR_CODE_CHECK\()(\w+?)\(", body, re.MULTILINE)
        if "aoti_torch" not in kernel or "cuda" in kernel
    ]
    counts = Counter("triton" if kernel.startswith("triton_") else kernel for kernel in launched)
    once = 4  # the tables; the last norm in one kernel or two, and the logits
    assert layers > 1 and counts.pop("triton") in range(3 * layers + once - 1, 3 * layers + once + 1)
    assert counts == {
        "mm_out": 4 * layers + 1, "rope_cache": layers, "paged_decode": layers, "paged_combine": layers,
        "paged_prefill": layers,
    }  # fmt: skip


def test_it_is_for_gpus() -> None:
    [entry] = [entry for entry in PASSES if entry.name == "fuse_rope_cache"]
    assert entry.devices == ("cuda",) and entry.default is True
