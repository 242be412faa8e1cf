"""Cumulative operators against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shim import CODES, Opt, ShimError, call

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=0, max_size=3),
    st.sampled_from([*FLOATS, torch.int32, torch.uint8, torch.bool, torch.complex64]),
    st.sampled_from([None, torch.float32, torch.float64, torch.int64]), st.data(),
)  # fmt: skip
def test_cumsum_and_cumprod(shape: list[int], dtype: torch.dtype, out: torch.dtype | None, data: st.DataObject) -> None:
    if dtype.is_complex:
        out = None
    x = (torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 3).to(dtype)
    if len(shape) > 1:
        x = x.transpose(0, 1)
    dim = data.draw(st.integers(-max(len(shape), 1), max(len(shape), 1) - 1))
    code = Opt(None if out is None else CODES[out], "int32")
    for name in ("cumsum", "cumprod"):
        got = call(f"aoti_torch_cpu_{name}", x, dim, code, returns=1)
        expected = getattr(torch, name)(x, dim, dtype=out)
        torch.testing.assert_close(got, expected)
        if x.numel():
            assert got.stride() == expected.stride()


@pytest.mark.parametrize("name", ["cummax", "cummin"])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.bool])
def test_cummax_and_cummin(name: str, dtype: torch.dtype) -> None:
    x = torch.randint(0, 4, (5, 6, 2), generator=torch.Generator().manual_seed(1)).to(dtype).transpose(0, 2)
    if dtype.is_floating_point:
        x[0, 3, 0] = float("nan")
    for dim in (0, 1, -1):
        values, indices = call(f"aoti_torch_cpu_{name}", x, dim, returns=2)
        expected = getattr(torch, name)(x, dim)
        torch.testing.assert_close(values, expected.values, equal_nan=True)
        assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("dtype", FLOATS)
def test_logcumsumexp(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 50, generator=torch.Generator().manual_seed(1)) * 30).to(dtype)
    x[0, 0], x[1, 3], x[2, 4] = float("-inf"), float("inf"), float("nan")
    got = call("aoti_torch_cpu_logcumsumexp", x, 1, returns=1)
    torch.testing.assert_close(got, torch.logcumsumexp(x, 1), equal_nan=True)


def test_a_long_scan_is_parallel_and_right() -> None:
    x = torch.rand(300, 400)
    torch.testing.assert_close(call("aoti_torch_cpu_cumsum", x, 0, Opt(None), returns=1), x.cumsum(0))


def test_errors() -> None:
    with pytest.raises(ShimError, match="cumsum: dimension 1 is out of range for a 1-D tensor"):
        call("aoti_torch_cpu_cumsum", torch.zeros(2), 1, Opt(None), returns=1)
    eight = torch.zeros(3, dtype=torch.float8_e4m3fn)
    with pytest.raises(ShimError, match="cumsum: dtype float8_e4m3fn is not supported$"):
        call("aoti_torch_cpu_cumsum", eight, 0, Opt(None), returns=1)
    to_eight = Opt(CODES[torch.float8_e4m3fn], "int32")
    with pytest.raises(ShimError, match="cumprod: dtype float8_e4m3fn is not supported for the result"):
        call("aoti_torch_cpu_cumprod", torch.zeros(3), 0, to_eight, returns=1)
    with pytest.raises(ShimError, match="logcumsumexp: dtype int64 is not supported, expected a floating type"):
        call("aoti_torch_cpu_logcumsumexp", torch.zeros(2, dtype=torch.int64), 0, returns=1)
