"""Convolution shims against PyTorch's eager operators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import Opt, ShimError, call

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def check(got: torch.Tensor, want: torch.Tensor, strides: bool = True) -> None:
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    if strides and want.numel() > 0:
        assert got.stride() == want.stride()
    tolerance = TOLERANCE[want.dtype]
    scale = max(1.0, want.abs().max().item()) if want.numel() > 0 else 1.0
    torch.testing.assert_close(got.double() / scale, want.double() / scale, rtol=tolerance, atol=tolerance)


def convolve(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    out: torch.Tensor = call("aoti_torch_cpu_convolution", x, w, Opt(b), *rest, returns=1)
    return out


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_convolution_matches_eager(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.sampled_from([1, 2, 2, 2, 3]))
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    per_in, per_out = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    transposed = draw(st.booleans())
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)]
    dilation = [draw(st.integers(1, 2)) for _ in range(n)]
    padding = [draw(st.integers(0, 2)) for _ in range(n)]
    extra = [draw(st.integers(0, s - 1)) for s in stride] if transposed else [0] * n
    size = [draw(st.integers(5, 9)) for _ in range(n)]
    seed = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(draw(st.integers(1, 3)), groups * per_in, *size, generator=seed).to(dtype)
    shape = [groups * per_in, per_out] if transposed else [groups * per_out, per_in]
    w = torch.randn(*shape, *kernel, generator=seed).to(dtype)
    b = torch.randn(groups * per_out, generator=seed).to(dtype) if draw(st.booleans()) else None
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if n in formats and draw(st.booleans()):
        x = x.to(memory_format=formats[n])
    if n in formats and draw(st.booleans()):
        w = w.to(memory_format=formats[n])
    if draw(st.booleans()):
        x = x.transpose(-1, 1).contiguous().transpose(-1, 1)
    args = (stride, padding, dilation, transposed, extra, groups)
    want = torch.ops.aten.convolution(x, w, b, *args)
    if dtype in (torch.bfloat16, torch.float16):  # eager's half kernels round in between: compare with float
        wide = torch.ops.aten.convolution(x.float(), w.float(), None if b is None else b.float(), *args).to(dtype)
        want = torch.empty_strided(want.shape, want.stride(), dtype=dtype).copy_(wide)
    check(convolve(x, w, b, *args), want)


CASES = {
    "resnet": ((1, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1),
    "stem": ((1, 3, 96, 96), (64, 3, 7, 7), 2, 3, 1, 1),
    "deep": ((1, 512, 7, 7), (512, 512, 3, 3), 1, 1, 1, 1),
    "pointwise": ((2, 96, 28, 28), (192, 96, 1, 1), 1, 0, 1, 1),
    "depthwise": ((2, 96, 33, 57), (96, 1, 3, 3), 1, 1, 1, 96),
    "depthwise stride 2": ((1, 40, 65, 131), (40, 1, 5, 5), 2, 2, 1, 40),
    "depthwise multiplier": ((1, 40, 20, 70), (80, 1, 3, 3), 3, 1, 2, 40),
    "whisper": ((1, 80, 3000), (128, 80, 3), 1, 1, 1, 1),
    "whisper 2": ((1, 128, 1000), (64, 128, 3), 2, 1, 1, 1),
    "resnext": ((1, 64, 28, 28), (64, 4, 3, 3), 1, 1, 1, 16),
    "wide padding": ((1, 2, 3, 3), (4, 2, 3, 3), 1, 9, 1, 1),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_common_shapes(case: str, channels_last: bool) -> None:
    x_shape, w_shape, stride, padding, dilation, groups = CASES[case]
    x, w, b = torch.randn(x_shape), torch.randn(w_shape), torch.randn(w_shape[0])
    if channels_last:
        if x.dim() != 4:
            pytest.skip("no channels-last format")
        x = x.to(memory_format=torch.channels_last)
    args = ([stride], [padding], [dilation], False, [0], groups)
    check(convolve(x, w, b, *args), torch.ops.aten.convolution(x, w, b, *args))


@pytest.mark.parametrize("groups", [1, 4])
def test_transposed_large(groups: int) -> None:
    x, w, b = torch.randn(2, 32, 30, 31), torch.randn(32, 24 // groups, 4, 4), torch.randn(24)
    args = ([2, 2], [1, 1], [1, 1], True, [0, 1], groups)
    check(convolve(x, w, b, *args), torch.ops.aten.convolution(x, w, b, *args))


def test_strided_weight_and_bias() -> None:
    x, w = torch.randn(2, 4, 9, 9)[:, :, ::2], torch.randn(3, 3, 4, 6).permute(3, 2, 0, 1)
    b = torch.randn(12)[::2]
    args = ([1], [1], [1], False, [0], 1)
    check(convolve(x, w, b, *args), torch.ops.aten.convolution(x, w, b, *args), strides=False)


def test_expanded_input() -> None:
    x, w = torch.randn(1, 1, 9, 9).expand(2, 4, 9, 9), torch.randn(6, 4, 3, 3)
    args = ([1], [1], [1], False, [0], 1)
    check(convolve(x, w, None, *args), torch.ops.aten.convolution(x, w, None, *args))


def test_empty_batch() -> None:
    out = convolve(torch.randn(0, 4, 9, 9), torch.randn(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert out.shape == (0, 6, 7, 7)


def test_no_input_channels_gives_the_bias() -> None:
    b = torch.randn(6)
    out = convolve(torch.randn(1, 0, 9, 9), torch.randn(6, 0, 3, 3), b, [1], [0], [1], False, [0], 1)
    assert torch.equal(out, b[None, :, None, None].expand(1, 6, 7, 7))


def test_deprecated_name() -> None:
    x, w, b = torch.randn(1, 4, 9), torch.randn(6, 4, 3), torch.randn(6)
    flag_args = ([2], [1], [1], False, [0], 1)
    check(
        call("aoti_torch_convolution", x, w, b, *flag_args, returns=1), torch.ops.aten.convolution(x, w, b, *flag_args)
    )
    check(
        call("aoti_torch_convolution", x, w, None, *flag_args, returns=1),
        torch.ops.aten.convolution(x, w, None, *flag_args),
    )


X, W = torch.zeros(2, 8, 10, 12), torch.zeros(6, 8, 3, 3)
ERRORS = {
    "input rank": (
        (X[0], W, None, [1], [0], [1], False, [0], 1),
        "convolution: argument 'input' must be 4-D like weight [6, 8, 3, 3], got shape [8, 10, 12]",
    ),
    "weight rank": (
        (X, W[0, 0], None, [1], [0], [1], False, [0], 1),
        "convolution: argument 'weight' must be 3-D, 4-D or 5-D, got shape [3, 3]",
    ),
    "channels": (
        (X, W[:, :7], None, [1], [0], [1], False, [0], 1),
        "convolution: weight [6, 7, 3, 3] with groups=1 expects 7 input channels, got input [2, 8, 10, 12]",
    ),
    "groups": (
        (X, W, None, [1], [0], [1], False, [0], 4),
        "convolution: weight [6, 8, 3, 3] does not divide into 4 groups",
    ),
    "no groups": (
        (X, W, None, [1], [0], [1], False, [0], 0),
        "convolution: argument 'groups' must be positive, got 0",
    ),
    "bias": (
        (X, W, torch.zeros(5), [1], [0], [1], False, [0], 1),
        "convolution: argument 'bias' must have shape [6], got [5]",
    ),
    "bias dtype": (
        (X, W, torch.zeros(6).double(), [1], [0], [1], False, [0], 1),
        "convolution: bias is float64 but input is float32; convert one of them",
    ),
    "dtypes": (
        (X, W.double(), None, [1], [0], [1], False, [0], 1),
        "convolution: input is float32 but weight is float64; convert one of them",
    ),
    "integers": (
        (X.long(), W.long(), None, [1], [0], [1], False, [0], 1),
        "convolution: dtype int64 is not supported, expected float16, bfloat16, float32 or float64",
    ),
    "stride": (
        (X, W, None, [0, 1], [0], [1], False, [0], 1),
        "convolution: argument 'stride' must be positive, got [0, 1]",
    ),
    "stride count": (
        (X, W, None, [1, 1, 1], [0], [1], False, [0], 1),
        "convolution: argument 'stride' must have 1 or 2 values, got [1, 1, 1]",
    ),
    "padding": (
        (X, W, None, [1], [-1], [1], False, [0], 1),
        "convolution: argument 'padding' must not be negative, got [-1]",
    ),
    "dilation": (
        (X, W, None, [1], [0], [0], False, [0], 1),
        "convolution: argument 'dilation' must be positive, got [0]",
    ),
    "kernel": (
        (X[:, :, :2, :2], W, None, [1], [0], [1], False, [0], 1),
        (
            "convolution: kernel [6, 8, 3, 3] with dilation [1] is larger than the padded input, "
            "got input [2, 8, 2, 2] with padding [0]"
        ),
    ),
    "output padding": (
        (X, W.transpose(0, 1), None, [1], [0], [1], True, [1], 1),
        "convolution: argument 'output_padding' must be smaller than stride or dilation, got [1]",
    ),
    "empty kernel": (
        (X, W[:, :, :0], None, [1], [0], [1], False, [0], 1),
        "convolution: argument 'weight' has an empty kernel, shape [6, 8, 0, 3]",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    args, text = ERRORS[case]
    with pytest.raises(ShimError) as failure:
        convolve(*args)
    assert str(failure.value) == text
