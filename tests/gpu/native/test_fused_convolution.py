"""The convolution with a residual sum and ReLU in its kernel, against float64 on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.depthwise import Problem, depthwise_problems
from tests.native.shim import I32, Opt, ShimError, call
from untorch.ops.activations import ACTIVATIONS, activate
from untorch.ops.fused_convolution import DTYPES, fused_convolution, stored_weight, tune

# Of the largest value: rounding of the result and, where the steps have kernels of their own, of the convolution.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
TUNED_TOLERANCE = {torch.float32: 5e-3, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # the reference has TF32
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    *args: Any,
) -> torch.Tensor:
    stride, padding, dilation, transposed, extra, groups = args
    weight = stored_weight(w, transposed, groups)
    out: torch.Tensor = call(
        "aoti_torch_cuda_fused_convolution", x, weight, Opt(bias), Opt(residual), stride, padding, dilation,
        I32(transposed), extra, groups, activation, I32(0), "", returns=1,
    )  # fmt: skip
    return out


def check(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    with_residual: bool,
    activation: str,
    *args: Any,
) -> None:
    wide = [None if t is None else t.cpu().double() for t in (x, w, bias)]
    want = torch.ops.aten.convolution(*wide, *args)
    residual = torch.randn(want.shape).to(x.dtype).cuda() if with_residual else None
    if residual is not None:
        want = want + residual.cpu().double()
    want = activate(want, activation)
    got = convolve(x, w, bias, residual, activation, *args)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    assert got.is_contiguous(memory_format=LAST[x.dim()])
    scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got.cpu().double() / scale, want / scale, rtol=0, atol=TOLERANCE[x.dtype])
    assert torch.equal(convolve(x, w, bias, residual, activation, *args), got), "the same input gave other bits"


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_problems(data: st.DataObject) -> None:
    draw = data.draw
    n = draw(st.integers(2, 3))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    cin, cout = (groups * draw(st.sampled_from([1, 2, 3, 5, 8, 16])) for _ in range(2))
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
    if draw(st.booleans()):
        x = x.to(memory_format=LAST[n + 2])
    bias = torch.randn(cout, generator=generator).to(dtype).cuda() if draw(st.booleans()) else None
    activation = draw(st.sampled_from(["none", "relu", *ACTIVATIONS]))
    args = (stride, padding, dilation, transposed, extra, groups)
    check(x, w.to(dtype).cuda(), bias, draw(st.booleans()), activation, *args)


LAYERS = [
    ((8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1),
    ((4, 3, 224, 224), (64, 3, 7, 7), 2, 3, 1),
    ((8, 256, 14, 14), (512, 256, 1, 1), 2, 0, 1),
    ((4, 96, 56, 56), (96, 1, 7, 7), 1, 3, 96),  # depthwise
    ((2, 128, 28, 28), (128, 4, 3, 3), 1, 1, 32),  # grouped
    ((2, 64, 4, 28, 28), (64, 64, 3, 3, 3), 1, 1, 1),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("activation", ["none", "relu"])
@pytest.mark.parametrize(("x", "w", "stride", "padding", "groups"), LAYERS)
def test_layers(
    dtype: torch.dtype, with_bias: bool, with_residual: bool, activation: str,
    x: tuple[int, ...], w: tuple[int, ...], stride: int, padding: int, groups: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    image, weight = (torch.randn(s, generator=generator).to(dtype).cuda() for s in (x, w))
    bias = torch.randn(w[0], generator=generator).to(dtype).cuda() if with_bias else None
    n = len(x) - 2
    check(
        image, weight, bias, with_residual, activation, [stride] * n, [padding] * n, [1] * n, False, [0] * n, groups
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [3, 16, 64, 128])
def test_nan_stays(dtype: torch.dtype, channels: int) -> None:
    x, w = torch.randn(1, channels, 8, 8), torch.randn(channels, channels, 3, 3)
    x[0, :, 4, 4] = torch.nan
    bias = torch.zeros(channels, dtype=dtype, device="cuda")
    got = convolve(
        x.to(dtype).cuda(), w.to(dtype).cuda(), bias, None, "relu", [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    )  # fmt: skip
    assert got[0, :, 3:6, 3:6].isnan().all()
    assert not got[0, :, 0].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [3, 5, 7])
def test_depthwise(kernel: int, stride: int, dtype: torch.dtype) -> None:
    """Of whole vectors of channels and of others; few threads and many; all activations."""
    shapes = [
        (1, 8, 7, 7, kernel // 2, "silu"), (2, 24, 14, 15, 0, "hardswish"), (1, 40, 33, 57, kernel - 1, "relu6"),
        (3, 16, 8, 130, 1, "gelu"), (2, 6, 9, 9, 1, "relu"), (2, 7, 9, 9, 1, "relu"), (16, 64, 112, 112, kernel // 2, "none"),
        (1, 96, 56, 56, kernel // 2, "gelu_tanh"), (1, 32, 20, 20, 1, "sigmoid"), (1, 32, 20, 20, 1, "tanh"),
        (1, 32, 20, 20, 1, "hardsigmoid"),
    ]  # fmt: skip
    for number, (batch, channels, height, width, padding, activation) in enumerate(shapes):
        if min(height, width) + 2 * padding < kernel:
            continue
        x = torch.randn(batch, channels, height, width, device="cuda").to(dtype)
        w = torch.randn(channels, 1, kernel, kernel, device="cuda").to(dtype)
        bias = torch.randn(channels, device="cuda").to(dtype) if number % 2 else None
        args = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], channels)
        check(x, w, bias, number % 3 == 0, activation, *args)


@settings(max_examples=150, deadline=None)
@given(
    problem=depthwise_problems(DTYPES, 2),
    with_residual=st.booleans(),
    activation=st.sampled_from(["none", "relu", *ACTIVATIONS]),
)
def test_depthwise_of_any_size(problem: Problem, with_residual: bool, activation: str) -> None:
    x, w, bias, args = problem
    check(x.cuda(), w.cuda(), None if bias is None else bias.cuda(), with_residual, activation, *args)


def test_a_depthwise_image_that_is_not_aligned() -> None:
    memory = torch.randn(8 * 9 * 9 + 1, device="cuda").half()
    x = memory[1:].view(1, 9, 9, 8).permute(0, 3, 1, 2)
    w = torch.randn(8, 1, 3, 3, device="cuda").half()
    check(x, w, None, False, "silu", [1, 1], [1, 1], [1, 1], False, [0, 0], 8)


def test_empty() -> None:
    x, w = torch.zeros(0, 3, 8, 8, device="cuda"), torch.randn(3, 3, 3, 3, device="cuda")
    got = convolve(x, w, None, None, "relu", [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert got.shape == (0, 3, 6, 6)


def test_no_input_channels() -> None:
    x, w = torch.zeros(2, 0, 8, 8, device="cuda"), torch.zeros(4, 0, 3, 3, device="cuda")
    bias = torch.tensor([-1.0, 0.0, 1.0, 2.0], device="cuda")
    got = convolve(x, w, bias, None, "relu", [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert torch.equal(got, bias.relu().view(1, 4, 1, 1).expand(2, 4, 6, 6))


def test_refusals() -> None:
    x, w = torch.randn(1, 4, 8, 8, device="cuda"), torch.randn(4, 4, 3, 3, device="cuda")
    args = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    with pytest.raises(ShimError, match=r"argument 'activation' must be none, relu, .* or gelu_tanh, got 'elu'"):
        convolve(x, w, None, None, "elu", *args)
    with pytest.raises(ShimError, match=r"argument 'residual' must have shape \[1, 4, 8, 8\], got \[1, 4, 8, 7\]"):
        convolve(x, w, None, x[..., :7], "none", *args)
    with pytest.raises(ShimError, match=r"residual is float16 but input is float32; convert one of them"):
        convolve(x, w, None, x.half(), "none", *args)
    with pytest.raises(ShimError, match=r"argument 'x' must be 4-D or 5-D, got shape \[4, 8, 8\]"):
        convolve(x[0], w, None, None, "none", *args)
    with pytest.raises(ShimError, match=r"argument 'weight' must be 4-D, or 3-D of a depthwise convolution, got shape"):
        convolve(x, w[0, 0], None, None, "none", *args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fastest_algorithm_gives_the_same(dtype: torch.dtype) -> None:
    images = torch.randn(8, 64, 28, 28, device="cuda").to(dtype).to(memory_format=torch.channels_last)
    weight = stored_weight(torch.randn(64, 64, 3, 3, device="cuda").to(dtype) / 24, False, 1)
    bias, residuals = torch.randn(64, device="cuda").to(dtype), torch.randn_like(images)
    rest: list[Any] = [[1, 1], [1, 1], [1, 1], False, [0, 0], 1, "relu"]
    found = tune(images[:2], weight, bias, residuals[:2], *rest, dtype == torch.float32)
    prefix = (
        f"cudnn={torch.backends.cudnn.version()} gpu={torch.cuda.get_device_name()} input=2x1x28x28 fused algorithm="
    )
    assert found.plan.startswith(prefix)
    assert found.plan.removeprefix(prefix).isdecimal()
    assert 0 < found.best_us <= found.first_us
    plans = [(2, found.plan), (1, found.plan), (8, "")]
    # Plans that are none: each for another number of images, which is another problem.
    for count, number in enumerate(["", "-1", "1x", "9999"], start=3):
        plans.append((count, prefix.replace("input=2x", f"input={count}x") + number))
    stride, padding, dilation, transposed, extra, groups, activation = rest
    want = fused_convolution(images, weight, bias, residuals, *rest, True).double()
    for count, plan in plans:
        got = call(
            "aoti_torch_cuda_fused_convolution", images[:count], weight, Opt(bias), Opt(residuals[:count]), stride,
            padding, dilation, I32(transposed), extra, groups, activation, I32(1), plan, returns=1,
        )  # fmt: skip
        off = (got.double() - want[:count]).abs().max() / want.abs().max()
        assert off < TUNED_TOLERANCE[dtype], plan
