"""Tests of repack_int4: the values, weights that are shared or computed, and the results of an exported file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pass_graphs import assert_same, close, exported, targets, unlift
from torch import nn

from untorch.export import CompileError
from untorch.export.options import ExportOptions
from untorch.export.passes import run_passes
from untorch.export.passes.drop_dead_code import drop_dead_code
from untorch.export.passes.repack_int4 import repack_int4
from untorch.ops.int4_layout import unpack_int4

OPERATOR = "_weight_int4pack_mm_for_cpu"


class PackedForThisCpu(nn.Module):
    """Values [n, k] as PyTorch packs them here, and ``calls`` GEMMs with them."""

    def __init__(self, n: int, k: int, group: int, dtype: torch.dtype = torch.float32, calls: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(n + k)
        self.group, self.calls = group, calls
        self.values = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.int32)
        self.register_buffer("weight", torch.ops.aten._convert_weight_to_int4pack_for_cpu(self.values, 1))
        scales = torch.randn(k // group, n, 2, generator=generator) * 0.1
        self.register_buffer("scales", scales.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = [
            torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.weight, self.group, self.scales)
            for _ in range(self.calls)
        ]
        total: torch.Tensor = sum(results[1:], results[0])
        return total


# Blocks of 64, 32 and 16 columns, as CPUs with other vectors have them, and what is left over; every tile; more rows than
# are looked at together.
@pytest.mark.parametrize(("n", "k", "group"), [(64, 128, 32), (16, 32, 32), (48, 64, 64), (1104, 384, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_before_and_after(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    model, x = PackedForThisCpu(n, k, group, dtype), torch.randn(5, k, dtype=dtype)
    module = unlift(model, x)
    assert targets(module) == ["self.weight", "self.scales", OPERATOR]
    report = repack_int4(module)
    drop_dead_code(module)
    close(module)
    assert targets(module) == ["self.scales", "self.weight_values", "untorch.int4_linear"]
    assert report.changed == [OPERATOR]
    assert torch.equal(unpack_int4(module.get_buffer("weight_values")), model.values.to(torch.uint8))
    assert set(dict(module.named_buffers())) == {"scales", "weight_values"}
    rounding = {torch.float32: 1e-4, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    assert_same(module(x), model(x), rtol=rounding, atol=1e-3)


def test_a_weight_of_two_gemms_is_stored_once() -> None:
    module = unlift(PackedForThisCpu(64, 128, 32, calls=2), torch.randn(3, 128))
    assert len(repack_int4(module).changed) == 2
    drop_dead_code(module)
    close(module)
    assert set(dict(module.named_buffers())) == {"scales", "weight_values"}


def test_a_weight_that_is_computed_stays() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales)
            return y

    packed = PackedForThisCpu(64, 128, 32)
    module = unlift(Model(), torch.randn(3, 128), packed.weight, packed.scales)
    report = repack_int4(module)
    assert report.changed == []
    assert list(report.skipped.values()) == ["the weight is computed, not a constant"]
    assert targets(module) == [OPERATOR]


def test_an_order_that_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows at a time than a CPU packs together."""
    monkeypatch.setattr("untorch.export.passes.repack_int4._ROWS", 16)
    module = unlift(PackedForThisCpu(64, 128, 32), torch.randn(3, 128))
    with pytest.raises(CompileError) as caught:
        run_passes(module, ExportOptions())
    assert str(caught.value) == (
        "method 'forward': PyTorch packs int4 weights in an order that depends on n, which "
        "untorch cannot read: quantise with untorch.quant"
    )


def test_it_is_for_the_cpu() -> None:
    module = unlift(nn.Linear(4, 4), torch.randn(2, 4))
    [report] = [r for r in run_passes(module, ExportOptions(), "cuda") if r.name == "repack_int4"]
    assert report.not_run == "it is for cpu, and the method is for cuda"


@pytest.mark.slow
def test_an_exported_file(tmp_path: Path) -> None:
    model, x = PackedForThisCpu(80, 256, 64), torch.randn(7, 256)
    [got], report = exported(model, (x,), tmp_path, verify=True)
    assert_same(got, model(x), rtol=1e-4, atol=1e-4)
    [done] = [done for done in report.passes if done.name == "repack_int4"]
    assert done.changed == [OPERATOR]
