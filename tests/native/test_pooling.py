"""Pooling, unpooling and fractional pooling shims against PyTorch's eager operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

FLOATS = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]


def same(got: torch.Tensor, want: torch.Tensor, tolerance: float = 0.0) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() > 0:
        assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)


def draw_input(data: st.DataObject, n: int, dtypes: list[torch.dtype]) -> torch.Tensor:
    draw = data.draw
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    size = [draw(st.integers(1, 3)), draw(st.integers(1, 5)), *(draw(st.integers(4, 9)) for _ in range(n))]
    dtype = draw(st.sampled_from(dtypes))
    x = (torch.randn(size, generator=seed) * 20).to(dtype)
    layout = draw(st.sampled_from(["rows", "last", "unbatched", "transposed"]))
    if layout == "last":
        x = x.to(memory_format=torch.channels_last if n == 2 else torch.channels_last_3d)
    elif layout == "unbatched":
        x = x[0]
    elif layout == "transposed":
        x = x.transpose(-1, -2)
    return x


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_avg_pool(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n, [*FLOATS, torch.int64])
    kernel = [draw(st.integers(1, 4)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)] if draw(st.booleans()) else []
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    divisor = draw(st.sampled_from([None, 3]))
    if x.dtype == torch.int64:  # eager has no integer kernel for channels last
        x = x.contiguous()
    args = (kernel, stride, padding, draw(st.booleans()), draw(st.booleans()))
    wide = x.float() if x.element_size() == 2 else x  # eager's half kernels round in between: compare with float
    want = getattr(torch.ops.aten, f"avg_pool{n}d")(wide, *args, divisor).to(x.dtype)
    got = call(f"aoti_torch_cpu_avg_pool{n}d", x, *args, Opt(divisor, "int64"), returns=1)
    same(got, want, {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.int64: 0.0}.get(x.dtype, 1e-5))


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_max_pool_with_indices(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n, [*FLOATS, torch.int64])
    if x.is_floating_point() and draw(st.booleans()):
        x[(0,) * x.dim()] = torch.nan
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)] if draw(st.booleans()) else []
    padding = [draw(st.integers(0, k // 2)) for k in kernel]
    dilation = [draw(st.integers(1, 2)) if k < 3 else 1 for k in kernel]
    args = (kernel, stride, padding, dilation, draw(st.booleans()))
    want = getattr(torch.ops.aten, f"max_pool{n}d_with_indices")(x, *args)
    got = call(f"aoti_torch_cpu_max_pool{n}d_with_indices", x, *args, returns=2)
    same(got[0], want[0])
    same(got[1], want[1])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_adaptive_pools(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([2, 3]))
    x = draw_input(data, n, FLOATS)
    size = [draw(st.integers(1, 10)) for _ in range(n)]
    wide = x.float() if x.element_size() == 2 else x  # eager's half kernels round in between: compare with float
    want = getattr(torch.ops.aten, f"_adaptive_avg_pool{n}d")(wide, size).to(x.dtype)
    got = call(f"aoti_torch_cpu__adaptive_avg_pool{n}d", x, size, returns=1)
    same(got, want, {torch.bfloat16: 2e-2, torch.float16: 2e-3}.get(x.dtype, 1e-5))
    want = getattr(torch.ops.aten, f"adaptive_max_pool{n}d")(x, size)
    got = call(f"aoti_torch_cpu_adaptive_max_pool{n}d", x, size, returns=2)
    same(got[0], want[0])
    same(got[1], want[1])


@pytest.mark.parametrize("channels_last", [False, True])
def test_large_enough_for_threads(channels_last: bool) -> None:
    x = torch.randn(2, 64, 56, 56)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    args = ([3, 3], [2, 2], [1, 1])
    want = torch.ops.aten.max_pool2d_with_indices(x, *args, [1, 1], False)
    got = call("aoti_torch_cpu_max_pool2d_with_indices", x, *args, [1, 1], False, returns=2)
    same(got[0], want[0])
    same(got[1], want[1])
    want = torch.ops.aten.avg_pool2d(x, *args, False, True, None)
    same(call("aoti_torch_cpu_avg_pool2d", x, *args, False, True, None, returns=1), want, 1e-5)


def test_empty_batch() -> None:
    out = call("aoti_torch_cpu__adaptive_avg_pool2d", torch.zeros(0, 3, 4, 4), [1, 1], returns=1)
    assert out.shape == (0, 3, 1, 1)
    out = call("aoti_torch_cpu_adaptive_max_pool2d", torch.zeros(2, 3, 4, 4), [0, 1], returns=2)
    assert out[0].shape == out[1].shape == (2, 3, 0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
def test_unpool(channels_last: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 6, 8).to(dtype)
    y, i = torch.ops.aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    if channels_last:
        y, i = y.to(memory_format=torch.channels_last), i.to(memory_format=torch.channels_last)
    want = torch.ops.aten.max_unpool2d(y, i, [6, 8])
    same(call("aoti_torch_cpu_max_unpool2d", y, i, [6, 8], returns=1), want)
    x = torch.randn(2, 3, 6, 8, 4).to(dtype)
    y, i = torch.ops.aten.max_pool3d_with_indices(x, [2, 2, 2], [2, 2, 2])
    args = ([6, 8, 4], [2, 2, 2], [0, 0, 0])
    want = torch.ops.aten.max_unpool3d(y, i, *args)
    same(call("aoti_torch_cpu_max_unpool3d", y, i, *args, returns=1), want)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 3])
def test_fractional(n: int, dtype: torch.dtype, unbatched: bool) -> None:
    x, samples = torch.randn(2, 3, *[9, 8, 11][:n]).to(dtype), torch.rand(2, 3, n).to(dtype)
    if unbatched:
        x, samples = x[0], samples[:1]
    args = ([2, 3, 2][:n], [4, 3, 5][:n], samples)
    want = getattr(torch.ops.aten, f"fractional_max_pool{n}d")(x, *args)
    got = call(f"aoti_torch_cpu_fractional_max_pool{n}d", x, *args, returns=2)
    same(got[0], want[0])
    same(got[1], want[1])


X = torch.zeros(1, 2, 4, 4)
ERRORS: dict[str, tuple[str, tuple[Any, ...], int, str]] = {
    "rank": (
        "avg_pool2d", (X[0, 0], [2], [], [0], False, True, None), 1,
        "avg_pool2d: argument 'self' must be 3-D or 4-D, got shape [4, 4]",
    ),
    "empty": (
        "_adaptive_avg_pool2d", (X[:, :, :0], [1, 1]), 1,
        "_adaptive_avg_pool2d: argument 'self' must not be empty but for the batch, got shape [1, 2, 0, 4]",
    ),
    "kernel": (
        "avg_pool2d", (X, [0], [1], [0], False, True, None), 1,
        "avg_pool2d: argument 'kernel_size' must be positive, got [0]",
    ),
    "stride": (
        "avg_pool2d", (X, [2], [0], [0], False, True, None), 1,
        "avg_pool2d: argument 'stride' must be positive, got [0]",
    ),
    "padding": (
        "avg_pool2d", (X, [2], [1], [2], False, True, None), 1,
        "avg_pool2d: argument 'padding' must be between 0 and half the kernel, got [2] with kernel [2]",
    ),
    "divisor": (
        "avg_pool2d", (X, [2], [1], [0], False, True, Opt(0, "int64")), 1,
        "avg_pool2d: argument 'divisor_override' must not be 0",
    ),
    "dilation": (
        "max_pool2d_with_indices", (X, [2], [1], [0], [0], False), 2,
        "max_pool2d_with_indices: argument 'dilation' must be positive, got [0]",
    ),
    "output": (
        "max_pool2d_with_indices", (X, [5], [1], [0], [1], False), 2,
        "max_pool2d_with_indices: the output is empty for input [1, 2, 4, 4] and kernel [5]",
    ),
    "dtype": (
        "max_pool2d_with_indices", (X.bool(), [2], [1], [0], [1], False), 2,
        "max_pool2d_with_indices: dtype bool is not supported, expected a floating type",
    ),
    "adaptive size": (
        "adaptive_max_pool2d", (X, [2]), 2,
        "adaptive_max_pool2d: argument 'output_size' must have 2 values, got [2]",
    ),
    "unpool index": (
        "max_unpool2d", (X + 1, torch.full(X.shape, 99), [5, 5]), 1,
        "max_unpool2d: index 99 is outside of output_size [5, 5]",
    ),
    "unpool shape": (
        "max_unpool2d", (X, torch.zeros(1, 2, 4, 3, dtype=torch.int64), [5, 5]), 1,
        "max_unpool2d: argument 'indices' must have shape [1, 2, 4, 4], got [1, 2, 4, 3]",
    ),
    "unpool dtype": (
        "max_unpool2d", (X, X.int(), [5, 5]), 1,
        "max_unpool2d: argument 'indices' must be int64, got int32",
    ),
    "fractional size": (
        "fractional_max_pool2d", (X, [3, 3], [3, 2], torch.rand(1, 2, 2)), 2,
        "fractional_max_pool2d: kernel [3, 3] with output [3, 2] does not fit into input [1, 2, 4, 4]",
    ),
    "fractional samples": (
        "fractional_max_pool2d", (X, [2, 2], [2, 2], torch.rand(1, 2, 3)), 2,
        "fractional_max_pool2d: argument 'random_samples' must have shape [1, 2, 2], got [1, 2, 3]",
    ),
    "fractional dtype": (
        "fractional_max_pool2d", (X, [2, 2], [2, 2], torch.rand(1, 2, 2).double()), 2,
        "fractional_max_pool2d: argument 'random_samples' must be float32 like self, got float64",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    name, args, returns, text = ERRORS[case]
    with pytest.raises(ShimError) as failure:
        call(f"aoti_torch_cpu_{name}", *args, returns=returns)
    assert str(failure.value) == text
