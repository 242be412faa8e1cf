"""Convolution on the GPU against float64 on the CPU; strides against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.depthwise import Problem, depthwise_problems
from tests.native.shim import Opt, call

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Of the largest value: rounding of the result, plus float32 sums for float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolve(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
    out: torch.Tensor = call("aoti_torch_cuda_convolution", x, w, Opt(bias), *args, returns=1)
    return out


def check(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *args: Any) -> torch.Tensor:
    wide = [None if t is None else t.cpu().double() for t in (x, w, bias)]
    want = torch.ops.aten.convolution(*wide, *args)
    got = convolve(x, w, bias, *args)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.cpu().double() / scale, want / scale, rtol=0, atol=TOLERANCE[x.dtype])
    assert torch.equal(convolve(x, w, bias, *args), got), "the same input gave other bits"
    return got


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_convolution(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    cin, cout = groups * draw(st.integers(1, 5)), groups * draw(st.integers(1, 5))
    kernel = [draw(st.integers(1, 3)) for _ in range(n)]
    stride = [draw(st.integers(1, 3)) for _ in range(n)]
    padding = [draw(st.integers(0, 3)) for _ in range(n)]
    dilation = [draw(st.integers(1, 2)) for _ in range(n)]
    size = [draw(st.integers(1 + d * (k - 1), 12)) for k, d in zip(kernel, dilation, strict=True)]
    transposed = draw(st.booleans())
    extra = [draw(st.integers(0, max(s, d) - 1)) if transposed else 0 for s, d in zip(stride, dilation, strict=True)]
    if transposed:  # the output must not be empty
        padding = [min(p, d * (k - 1) // 2) for p, k, d in zip(padding, kernel, dilation, strict=True)]
    batch = draw(st.integers(1, 3))
    x = torch.randn(batch, cin, *size, generator=generator).to(dtype).cuda()
    w = torch.randn(*([cin, cout // groups] if transposed else [cout, cin // groups]), *kernel, generator=generator)
    w = w.to(dtype).cuda()
    if n > 1 and draw(st.booleans()):
        x = x.to(memory_format=LAST[n + 2])
    if n > 1 and draw(st.booleans()):
        w = w.to(memory_format=LAST[n + 2])
    if draw(st.booleans()):
        x = x.transpose(-1, -1 if n == 1 else -2)
        if n > 1:
            kernel_swap = [*range(n - 2), n - 1, n - 2]
            stride, padding, dilation, extra = ([v[i] for i in kernel_swap] for v in (stride, padding, dilation, extra))
            w = w.transpose(-1, -2)
    bias = torch.randn(cout, generator=generator).to(dtype).cuda() if draw(st.booleans()) else None
    check(x, w, bias, stride, padding, dilation, transposed, extra, groups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("x", "w", "stride", "padding", "groups"),
    [
        ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
        ((4, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
        ((8, 256, 14, 14), (512, 256, 1, 1), 2, 0, 1),
        ((4, 96, 56, 56), (96, 1, 7, 7), 1, 3, 96),  # depthwise
        ((4, 32, 28, 28), (64, 1, 3, 3), 2, 1, 32),  # depthwise, two outputs a channel
        ((2, 128, 28, 28), (128, 4, 3, 3), 1, 1, 32),  # grouped
    ],
)
def test_layers(
    dtype: torch.dtype, last: bool, x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    image, weight = (torch.randn(s, generator=generator).to(dtype).cuda() for s in (x, w))
    if last:
        image = image.to(memory_format=torch.channels_last)
    got = check(image, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    want = torch.ops.aten.convolution(image, weight, None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    assert got.stride() == want.stride()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "w", "stride", "padding", "dilation"),
    [
        ((1, 768, 49), (768, 48, 128), [1], [64], [1]),
        ((3, 64, 100), (24, 16, 19), [2], [5], [3]),
        ((2, 48, 10, 11), (36, 16, 5, 5), [1, 2], [2, 0], [1, 2]),
        ((1, 32, 5, 6, 7), (4, 16, 3, 3, 3), [1, 2, 1], [1, 0, 1], [1, 1, 2]),
        ((2, 512, 900), (512, 128, 128), [1], [64], [1]),  # its columns in parts
        ((2, 768, 1, 49), (768, 48, 1, 128), [1, 1], [0, 64], [1, 1]),
        ((1, 34, 12, 9), (6, 17, 4, 5), [1, 1], [1, 0], [1, 1]),  # channels that are not whole chunks
    ],
)
def test_groups_with_large_kernels(
    dtype: torch.dtype,
    x: tuple[int, ...],
    w: tuple[int, ...],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> None:
    generator = torch.Generator().manual_seed(1)
    images, weight = (torch.randn(s, generator=generator).to(dtype).cuda() for s in (x, w))
    bias = torch.randn(w[0], generator=generator).to(dtype).cuda()
    args = (stride, padding, dilation, False, [0] * len(stride), x[1] // w[1])
    got = check(images, weight, bias, *args)
    assert torch.equal(check(images.transpose(-1, -2).contiguous().transpose(-1, -2), weight, bias, *args), got)
    if images.dim() > 3:
        last = LAST[images.dim()]
        check(images.to(memory_format=last), weight.to(memory_format=last), bias, *args)
        check(images, weight.to(memory_format=last), bias, *args)  # channels last is the result alone


@settings(max_examples=150, deadline=None)
@given(problem=depthwise_problems(DTYPES, 1))
def test_depthwise_of_any_size(problem: Problem) -> None:
    x, w, bias, args = problem
    check(x.cuda(), w.cuda(), None if bias is None else bias.cuda(), *args)


def test_many_depthwise_outputs() -> None:
    """So many that a thread computes several."""
    for dtype in DTYPES:
        x = torch.randn(4, 64, 120, 131, device="cuda").to(dtype)
        x[0, 0, 50, 50] = torch.inf
        for kernel, dilation in (((1, 9), (1, 1)), ((5, 5), (2, 3))):
            w = torch.randn(64, 1, *kernel, device="cuda").to(dtype)
            args = ([1, 1], [k // 2 for k in kernel], list(dilation), False, [0, 0], 64)
            for image in (x, x.to(memory_format=torch.channels_last)):
                got = convolve(image, w, None, *args)
                want = torch.ops.aten.convolution(x.double(), w.double(), None, *args)
                finite = want.isfinite()
                assert torch.equal(got.isfinite(), finite)
                torch.testing.assert_close(got.double()[finite], want[finite], rtol=1e-2, atol=5e-2)


def test_strides_are_torchs() -> None:
    for dtype in DTYPES:
        for n in (2, 3):
            for x_last in (False, True):
                for w_last in (False, True):
                    x = torch.randn(2, 4, *[6] * n, device="cuda").to(dtype)
                    w = torch.randn(6, 4, *[3] * n, device="cuda").to(dtype)
                    if x_last:
                        x = x.to(memory_format=LAST[n + 2])
                    if w_last:
                        w = w.to(memory_format=LAST[n + 2])
                    for transposed in (False, True):
                        weight = w[:4].transpose(0, 1) if transposed else w
                        args = ([1] * n, [1] * n, [1] * n, transposed, [0] * n, 1)
                        want = torch.ops.aten.convolution(x, weight, None, *args)
                        assert convolve(x, weight, None, *args).stride() == want.stride(), (dtype, n, x_last, w_last)


@pytest.mark.parametrize("transposed", [False, True])
def test_empty(transposed: bool) -> None:
    args = ([1, 1], [0, 0], [1, 1], transposed, [0, 0], 1)
    x, w = torch.zeros(0, 3, 8, 8, device="cuda"), torch.randn(3, 3, 3, 3, device="cuda")
    assert convolve(x, w, None, *args).shape == torch.ops.aten.convolution(x, w, None, *args).shape


def test_no_input_channels() -> None:
    x, w = torch.zeros(2, 0, 8, 8, device="cuda"), torch.zeros(4, 0, 3, 3, device="cuda")
    bias = torch.arange(4.0, device="cuda")
    got = convolve(x, w, bias, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert torch.equal(got, bias.view(1, 4, 1, 1).expand(2, 4, 6, 6))


def test_float32_is_not_rounded_to_tf32() -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(4, 256, 14, 14, generator=generator), torch.randn(256, 256, 3, 3, generator=generator)
    got = convolve(x.cuda(), w.cuda(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1).cpu().double()
    want = torch.nn.functional.conv2d(x.double(), w.double(), padding=1)
    # TF32 has 10 bits of mantissa: its largest error here is about 5e-2.
    assert (got - want).abs().max().item() < 5e-3


def test_the_kept_plan_gives_the_same() -> None:
    x, w = torch.randn(2, 8, 16, 16, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda")
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    want = convolve(x, w, None, *args)
    for _ in range(3):
        assert torch.equal(convolve(x, w, None, *args), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_depthwise_row_major(kernel: int, stride: int, dtype: torch.dtype) -> None:
    for channels, height, width, padding in (
        (3, 7, 7, kernel // 2),
        (17, 14, 15, 0),
        (5, 33, 57, kernel - 1),
        (2, 8, 130, 1),
    ):
        if min(height, width) + 2 * padding < kernel:
            continue
        x = torch.randn(2, channels, height, width, device="cuda").to(dtype)
        w = torch.randn(channels, 1, kernel, kernel, device="cuda").to(dtype)
        bias = torch.randn(channels, device="cuda").to(dtype)
        check(x, w, bias, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], channels)
        check(
            x.transpose(2, 3).contiguous().transpose(2, 3),
            w,
            None,
            [stride] * 2,
            [padding] * 2,
            [1, 1],
            False,
            [0, 0],
            channels,
        )
