"""Fourier transform shims against PyTorch's eager operators."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import ShimError, call

TOLERANCE = {torch.complex64: 1e-5, torch.complex128: 1e-12}


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if want.numel() > 0:
        # Strides of dimensions of size 1 do not matter; eager and the fake kernel differ there.
        pairs = zip(want.shape, got.stride(), want.stride(), strict=True)
        assert all(n == 1 or a == b for n, a, b in pairs)
        scale = want.abs().max().item() or 1.0
        assert (got - want).abs().max().item() <= TOLERANCE[want.dtype] * scale


LENGTHS = [
    *range(1, 41),
    45,
    48,
    60,
    64,
    77,
    97,
    100,
    121,
    127,
    128,
    210,
    243,
    251,
    257,
    400,
    512,
    625,
    997,
    1000,
    1024,
]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("forward", [False, True])
def test_every_kind_of_length(dtype: torch.dtype, forward: bool) -> None:
    for n in LENGTHS:
        x = torch.randn(2, n, dtype=dtype)
        close(
            call("aoti_torch_cpu__fft_c2c", x, [1], 0, forward, returns=1), torch.ops.aten._fft_c2c(x, [1], 0, forward)
        )
        y = x.real.contiguous()
        close(
            call("aoti_torch_cpu__fft_r2c", y, [1], 0, forward, returns=1), torch.ops.aten._fft_r2c(y, [1], 0, forward)
        )


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_dimensions_strides_and_scales(data: st.DataObject) -> None:
    draw = data.draw
    ndim = draw(st.integers(1, 4))
    shape = [draw(st.integers(1, 7)) for _ in range(ndim)]
    dims = draw(st.lists(st.integers(0, ndim - 1), min_size=1, max_size=min(ndim, 3), unique=True))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    x = torch.randn(shape, dtype=dtype.to_complex()).permute(draw(st.permutations(range(ndim))))
    scale, flag = draw(st.integers(0, 2)), draw(st.booleans())
    want = torch.ops.aten._fft_c2c(x, dims, scale, flag)
    for name in ("aoti_torch_cpu__fft_c2c", "aoti_torch__fft_c2c"):
        close(call(name, x, dims, scale, flag, returns=1), want)
    y = x.real  # strided by two
    close(
        call("aoti_torch_cpu__fft_r2c", y, dims, scale, flag, returns=1), torch.ops.aten._fft_r2c(y, dims, scale, flag)
    )


def test_negative_and_no_dimensions() -> None:
    x = torch.randn(3, 8, dtype=torch.complex64)
    close(call("aoti_torch_cpu__fft_c2c", x, [-1], 0, True, returns=1), torch.fft.fft(x))
    close(call("aoti_torch_cpu__fft_c2c", x, [], 2, True, returns=1), x)


def test_long_batch_and_long_line() -> None:
    x = torch.randn(80, 400)
    close(call("aoti_torch_cpu__fft_r2c", x, [1], 0, True, returns=1), torch.ops.aten._fft_r2c(x, [1], 0, True))
    y = torch.randn(2, 30011, dtype=torch.complex64)
    close(call("aoti_torch_cpu__fft_c2c", y, [1], 1, True, returns=1), torch.ops.aten._fft_c2c(y, [1], 1, True))


def test_empty_batch() -> None:
    assert call("aoti_torch_cpu__fft_r2c", torch.zeros(0, 8), [1], 0, True, returns=1).shape == (0, 5)


Z = torch.zeros(2, 4, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("name", "x", "dims", "scale", "text"),
    [
        ("_fft_c2c", Z.real, [1], 0, "_fft_c2c: dtype float32 is not supported, expected complex64 or complex128"),
        ("_fft_r2c", Z, [1], 0, "_fft_r2c: dtype complex64 is not supported, expected float32 or float64"),
        ("_fft_r2c", Z.real.half(), [1], 0, "_fft_r2c: dtype float16 is not supported, expected float32 or float64"),
        ("_fft_c2c", Z, [1, -1], 0, "_fft_c2c: argument 'dim' names a dimension twice: [1, -1]"),
        ("_fft_c2c", Z[:, :0], [1], 0, "_fft_c2c: dimension 1 of shape [2, 0] is empty"),
        ("_fft_r2c", Z.real, [], 0, "_fft_r2c: argument 'dim' must name at least one dimension"),
        (
            "_fft_c2c", Z, [1], 3,
            "_fft_c2c: argument 'normalization' must be 0 (none), 1 (by root n) or 2 (by n), got 3",
        ),
    ],
)  # fmt: skip
def test_errors(name: str, x: torch.Tensor, dims: list[int], scale: int, text: str) -> None:
    with pytest.raises(ShimError) as failure:
        call(f"aoti_torch_cpu_{name}", x, dims, scale, True, returns=1)
    assert str(failure.value) == text
