"""Tests of serve_grouped_mm: before, after, other dtypes, and the results of an exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export.passes.serve_grouped_mm import serve_grouped_mm

pytest.importorskip("transformers.integrations.moe")  # registers the operator
FALLBACK, OURS = "transformers.grouped_mm_fallback", "untorch.moe_grouped_mm"
ENDS = [2, 2, 7, 9]


class Experts(nn.Module):
    """Weights [experts, N, K], as most of transformers' models have them, or [experts, K, N]."""

    def __init__(self, dtype: torch.dtype, transposed: bool = True, offs: torch.dtype = torch.int32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (4, 12, 8) if transposed else (4, 8, 12)
        self.weight = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        self.transposed, self.offs = transposed, offs

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        weight = self.weight.transpose(-2, -1) if self.transposed else self.weight
        y: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(x, weight, ends.to(self.offs))
        return y * 2


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    # The last two rows are behind the last group.
    return torch.randn(11, 8, generator=torch.Generator().manual_seed(1)).to(dtype), torch.tensor(ENDS).int()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transposed", [True, False])
def test_before_and_after(dtype: torch.dtype, transposed: bool) -> None:
    model, args = Experts(dtype, transposed), inputs(dtype)
    module = unlift(model, *args)
    before = targets(module)
    assert FALLBACK in before
    report = serve_grouped_mm(module)
    close(module)
    assert targets(module) == [OURS if name == FALLBACK else name for name in before]
    assert (report.changed, report.skipped) == (["grouped_mm_fallback"], {})
    assert_same(module(*args), model(*args))


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> tuple[list[str], dict[str, str]]:
    """What the pass changed and skipped in a call of PyTorch's operator."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, weight, offs=offs)

    module = unlift(Model(), x, weight, offs)
    expected = module(x, weight, offs)
    report = serve_grouped_mm(module)
    close(module)
    assert_same(module(x, weight, offs), expected)
    assert targets(module) == ["untorch.moe_grouped_mm" if report.changed else "_grouped_mm"]
    return report.changed, report.skipped


def test_pytorchs_own() -> None:
    def half(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)

    ends = torch.tensor([2, 8]).int()
    assert grouped_mm(half(8, 16), half(2, 24, 16).mT, ends) == (["_grouped_mm"], {})
    assert grouped_mm(half(8, 16), half(2, 10, 16).mT, ends) == (["_grouped_mm"], {})
    others = {"_grouped_mm": "the groups are not rows"}
    assert grouped_mm(half(24, 8), half(8, 16), torch.tensor([0, 8]).int()) == ([], others)
    assert grouped_mm(half(2, 24, 16), half(16, 8), ends) == ([], others)


def test_padded_rows_stay() -> None:
    """As PyTorch traces it for CUDA: rows of the result begin at multiples of 16 bytes."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            return torch._grouped_mm(x, weight, offs=offs)

    x, weight = torch.zeros(8, 16).to(torch.bfloat16), torch.zeros(2, 10, 16).to(torch.bfloat16).mT
    args = x, weight, torch.tensor([2, 8]).int()
    module = unlift(Model(), *args)
    [node] = module.graph.find_nodes(op="call_function", target=torch.ops.aten._grouped_mm.default)
    node.meta["val"] = torch.empty_strided((8, 10), (16, 1), dtype=torch.bfloat16, device="meta")
    assert serve_grouped_mm(module).skipped == {"_grouped_mm": "the rows of its result are padded"}


def test_offsets_become_int32() -> None:
    model, args = Experts(torch.float32, offs=torch.int64), inputs(torch.float32)
    module = unlift(model, *args)
    assert serve_grouped_mm(module).changed
    close(module)
    assert targets(module)[-3:] == ["to.dtype", OURS, "mul.Tensor"]
    assert_same(module(*args), model(*args))


def test_other_dtypes_stay() -> None:
    module = unlift(Experts(torch.float64), *inputs(torch.float64))
    report = serve_grouped_mm(module)
    assert report.changed == []
    assert report.skipped == {
        "grouped_mm_fallback": "the dtypes are float64 and float64, expected one of bfloat16, float16 and float32"
    }
    assert FALLBACK in targets(module)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_exported_file(dtype: torch.dtype, tmp_path: Path) -> None:
    model, args = Experts(dtype), inputs(dtype)
    results, report = exported(model, args, tmp_path)
    [done] = [p for p in report.passes if p.name == "serve_grouped_mm"]
    assert done.changed == ["grouped_mm_fallback"]
    assert_same(results, model(*args).detach(), rtol=2e-3, atol=2e-3 if dtype == torch.float16 else 1e-5)
    assert not results[0][ENDS[-1] :].any()
