"""NVFP4 linear layers on the CPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.nvfp4_weights import (
    BF16,
    E4M3,
    F16,
    F32,
    PREFILL_REFUSALS,
    Args,
    linear_refusals,
    random_weight,
)
from tests.native.operands import drawn_rows
from tests.native.shim import Opt, ShimError, call
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}
LINEAR = "aoti_torch_cpu_nvfp4_linear"


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    world: torch.Tensor,
    bias: torch.Tensor | None = None,
    prefill: str | None = "exact",
) -> torch.Tensor:
    got: torch.Tensor = call(LINEAR, x, packed, scales, world, Opt(bias), prefill, returns=1)
    return got


def close(got: torch.Tensor, want: torch.Tensor, size: torch.Tensor, rounding: float) -> bool:
    least = torch.finfo(got.dtype).smallest_normal * rounding  # half a step of subnormal numbers
    return bool(torch.all((got.double() - want).abs() <= want.abs() * rounding + size * 2.0**-18 + least))


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_nvfp4_linear(data: st.DataObject) -> None:
    draw = data.draw
    tiles = draw(st.sampled_from([0, 2, 4, 8]))
    n = draw(st.integers(1, 70)) if tiles == 0 else 8 * draw(st.integers(1, 12))
    k = 16 * max(tiles, 1) * draw(st.integers(1, 640 // (16 * max(tiles, 1))))
    seed = draw(st.integers(0, 99))
    packed, scales = random_weight(n, k, seed=seed)
    world = draw(st.sampled_from([torch.tensor(0.03), torch.tensor([2.5]), torch.rand(n) + 0.1]))
    dense = dequantize_nvfp4(packed, scales, world, torch.float64)
    width = k if draw(st.booleans()) else draw(st.integers(0, k))
    dtype = draw(st.sampled_from([F32, BF16, F16]))
    m = draw(st.integers(0, 10) | st.sampled_from([33, 200]))
    generator = torch.Generator().manual_seed(seed)
    x = drawn_rows(draw, lambda *shape: torch.randn(shape, generator=generator).to(dtype), m, width)
    bias = draw(st.sampled_from([None, torch.randn(n).to(dtype), torch.randn(2 * n).to(dtype)[::2]]))
    got = linear(x, packed if tiles == 0 else pack_nvfp4_tiles(packed, tiles), scales, world, bias)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], n), dtype, True)
    added = torch.zeros(1).double() if bias is None else bias.double()
    dense = dense[:, :width]
    want, size = x.double() @ dense.t() + added, x.double().abs() @ dense.abs().t() + added.abs()
    assert close(got, want, size, ROUNDING[dtype])


def test_every_value() -> None:
    """Exact: all codes with all scales, in both layouts."""
    codes = torch.arange(16).repeat(256, 8)
    scales = torch.arange(256, dtype=torch.uint8).view(E4M3).reshape(256, 1).expand(256, 8).contiguous()
    finite = torch.isfinite(scales[:, 0].float())
    packed, eye = pack_nvfp4(codes), torch.eye(128)
    want = dequantize_nvfp4(packed, scales, torch.tensor(0.5))
    for weight in (packed, pack_nvfp4_tiles(packed)):
        got = linear(eye, weight, scales, torch.tensor(0.5)).t()
        assert torch.equal(got[finite], want[finite])
        assert got[~finite].isnan().all()


@pytest.mark.parametrize("prefill", ["fp8", "fp4"])
def test_many_rows_are_exact_whatever_is_asked_for(prefill: str) -> None:
    (packed, scales), x, bias = random_weight(24, 128), torch.randn(700, 128).to(BF16), torch.randn(24).to(BF16)
    operands = (x, pack_nvfp4_tiles(packed), scales, torch.rand(24), bias)
    assert torch.equal(linear(*operands, prefill), linear(*operands))


@pytest.mark.parametrize(("prefill", "expected"), PREFILL_REFUSALS)
def test_unknown_prefill(prefill: str | None, expected: str) -> None:
    packed, scales = random_weight(8, 128)
    with pytest.raises(ShimError) as error:
        linear(torch.ones(2, 128), packed, scales, torch.ones(8), None, prefill)
    assert str(error.value) == expected


def refusal(change: dict[str, Any], text: str) -> Any:
    return pytest.param(change, text, id=text[:40])


def zeros(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), linear_refusals(zeros))
def test_refused_linear(args: Args, expected: str) -> None:
    with pytest.raises(ShimError) as error:
        call(LINEAR, *args[:4], Opt(args[4]), "exact", returns=1)
    assert str(error.value) == expected
