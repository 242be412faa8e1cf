"""Tests of paged_attention_kernels: what replaces the operator, and values of the graph on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.native.test_paged_attention import KV, batch
from untorch.export.errors import CompileError
from untorch.export.passes.paged_attention_kernels import paged_attention_kernels
from untorch.export.passes.table import PASSES
from untorch.ops.paged_attention import OPERATOR

pytest.importorskip("triton")


class Layers(nn.Module):
    """Two layers of one pool; the second reads what the first one wrote, too, and a third one only reads."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.tables = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
        self.numbers = {name: value for name, value in given.items() if name not in self.tables}

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        given = dict(zip(self.tables, tensors, strict=True)) | self.numbers
        order = [argument.name for argument in OPERATOR._schema.arguments]

        def attend(**changes: Any) -> torch.Tensor:
            values = given | changes
            out: torch.Tensor = OPERATOR(*(values[name] for name in order))
            return out

        first = attend()
        second = attend(q=first, offset=1024)
        return attend(q=second, k=None, v=None, offset=0)


def traced(
    width: int = 8,
    kv: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    elements: int | None = None,
    **changes: Any,
) -> tuple[torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    given = batch([(5, 20), (1, 33)], 4, 2, width, width, dtype=dtype, kv=kv) | changes
    shape = (given["pool"].shape[0], elements or 2048 * width // 8)
    given["pool"] = torch.randn(shape).to(dtype) if kv is None else torch.zeros(shape).to(kv)
    args = tuple(value for value in given.values() if isinstance(value, torch.Tensor))
    with torch.no_grad():
        return torch.export.export(Layers(given), args).module(), args


@pytest.mark.filterwarnings("ignore")
def test_it_takes_the_operators_place() -> None:
    module, args = traced()
    expected_args, found_args = ([x.clone() for x in args] for _ in range(2))
    expected = module(*expected_args)
    report = paged_attention_kernels(module, "sm_90")
    assert report.changed == ["paged_attention", "paged_attention_1", "paged_attention_2"] and not report.skipped
    calls = [node for node in module.graph.nodes if "paged_attention" in str(node.target)]
    assert {str(node.target) for node in calls if node.op == "call_function"} == {
        "untorch.paged_attention_triton.default"
    }
    assert module.paged_attention_offsets.tolist() == [[0, 0], [1024, 1024]]
    torch.testing.assert_close(module(*found_args), expected, rtol=0, atol=0)
    for found, wanted in zip(found_args, expected_args, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kv", KV[1:])
def test_pages_of_codes(kv: torch.dtype) -> None:
    module, args = traced(kv=kv)
    expected_args, found_args = ([x.clone() for x in args] for _ in range(2))
    expected = module(*expected_args)
    assert len(paged_attention_kernels(module, "sm_90").changed) == 3
    torch.testing.assert_close(module(*found_args), expected, rtol=0, atol=0)
    pool = next(i for i, x in enumerate(args) if x.dtype == kv)
    assert torch.equal(found_args[pool].view(torch.uint8), expected_args[pool].view(torch.uint8))


@pytest.mark.filterwarnings("ignore")
def test_fp8_on_an_older_gpu() -> None:
    module, _ = traced(kv=torch.float8_e4m3fn)
    with pytest.raises(CompileError) as caught:
        paged_attention_kernels(module, "sm_80")
    assert str(caught.value) == (
        "paged_attention: paged_attention: expected a GPU of sm_89 or newer for keys and values in FP8, got sm_80: use "
        "int8 (kv_dtype='int8')"
    )
    assert paged_attention_kernels(traced(kv=torch.int8)[0], "sm_80").changed


@pytest.mark.filterwarnings("ignore")
def test_heads_that_do_not_fit() -> None:
    module, _ = traced(width=320)
    with pytest.raises(CompileError) as caught:
        paged_attention_kernels(module, "sm_90")
    assert str(caught.value) == (
        "paged_attention: paged_attention: expected heads of at most 256 for keys and 256 for values on a GPU in "
        "float32, got 320 and 320"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("architecture", "options", "expected"),
    [
        ("sm_90", {}, True),
        ("sm_90a", {"dtype": torch.float16, "width": 128, "window": 5}, True),
        ("sm_90", {"sinks": torch.zeros(4), "chunk": 16}, True),
        ("sm_90", {"width": 256}, True),
        ("sm_90", {"width": 96, "window": 128}, True),
        ("sm_90", {"width": 64, "window": 129}, True),
        ("sm_90", {"width": 64, "window": 128}, False),
        ("sm_90", {"width": 264}, False),
        ("sm_90", {"width": 20, "elements": 6000}, False),
        ("sm_90", {"elements": 2052}, False),
        ("sm_90", {"dtype": torch.float32}, False),
        ("sm_90", {"kv": torch.int8}, False),
        ("sm_90", {"scale": -1.0}, False),
        ("sm_90", {"softcap": 30.0}, False),
        ("sm_90", {"alibi": torch.ones(4)}, False),
        ("sm_80", {}, False),
        ("sm_100", {}, False),
        (None, {}, False),
    ],
)
def test_which_prompts_are_the_wgmma_kernels(architecture: str | None, options: dict[str, Any], expected: bool) -> None:
    module, _ = traced(**{"dtype": torch.bfloat16} | options)
    paged_attention_kernels(module, architecture)
    calls = [node for node in module.graph.nodes if str(node.target) == "untorch.paged_attention_triton.default"]
    names = [argument.name for argument in calls[0].target._schema.arguments]
    flags = [node.args[names.index("wgmma")] for node in calls]
    # The second layer begins at 1024, which is no multiple of 96 or 20.
    assert flags[0] is expected and flags[2] is expected
    assert flags[1] is (expected and 1024 % options.get("width", 8) == 0)


def test_it_is_for_gpus() -> None:
    [entry] = [entry for entry in PASSES if entry.name == "paged_attention_kernels"]
    assert entry.devices == ("cuda",)
