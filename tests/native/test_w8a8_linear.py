"""w8a8_linear on the CPU, which multiplies rows as they are, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.operands import drawn_rows
from tests.native.shim import Opt, ShimError, call
from tests.native.w8_weights import BF16, F16, F32, KINDS, Args, random_w8, refusals
from untorch.ops.w8a8 import dequantize_w8

LINEAR = "aoti_torch_cpu_w8a8_linear"
ROUNDING = {F32: 2.0**-20, BF16: 2.0**-8, F16: 2.0**-10}


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_w8a8_linear(data: st.DataObject) -> None:
    draw = data.draw
    kind, dtype, seed = draw(st.sampled_from(KINDS)), draw(st.sampled_from([F32, BF16, F16])), draw(st.integers(0, 99))
    n, k = 16 * draw(st.integers(1, 12)), 16 * draw(st.integers(1, 40))
    values, scale = random_w8(n, k, kind, seed)
    generator = torch.Generator().manual_seed(seed)
    width = k if draw(st.booleans()) else draw(st.integers(0, k))
    x = drawn_rows(
        draw, lambda *shape: torch.randn(shape, generator=generator).to(dtype), draw(st.integers(0, 20)), width
    )
    bias = draw(st.sampled_from([None, torch.randn(n).to(dtype), torch.randn(2 * n).to(dtype)[::2]]))
    got = call(LINEAR, x, values, scale, Opt(bias), returns=1)
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], n), dtype, True)
    dense = dequantize_w8(values, scale, torch.float64)[:, :width]
    added = torch.zeros(1).double() if bias is None else bias.double()
    want, size = x.double() @ dense.t() + added, x.double().abs() @ dense.abs().t() + added.abs()
    least = torch.finfo(dtype).smallest_normal * ROUNDING[dtype]  # half a step of subnormal numbers
    assert torch.all((got.double() - want).abs() <= want.abs() * ROUNDING[dtype] + size * 2.0**-18 + least)


def made(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(("args", "expected"), refusals(made))
def test_what_is_refused(args: Args, expected: str) -> None:
    given: list[Any] = [*args[:3], Opt(args[3])]
    with pytest.raises(ShimError) as caught:
        call(LINEAR, *given, returns=1)
    assert str(caught.value).startswith(expected)
