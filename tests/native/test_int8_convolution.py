"""The W8A8 convolution on the CPU against exact integers, at every level of instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native.shim import I32, ROOT, Opt, ShimError, call, library_path

NAN, INF = float("nan"), float("inf")
FUNCTIONS = {
    "none": lambda y: y, "relu": torch.relu, "relu6": F.relu6, "hardswish": F.hardswish, "silu": F.silu,
}  # fmt: skip


def pack(values: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [o, c, kh, kw] as [groups][o/16][words][16][4], and the padded sums; depthwise: four taps are a word."""
    out, inputs, height, width = values.shape
    if groups > 1 and inputs == 1 and out == groups:
        rows = values.reshape(1, out, height * width)
    else:
        rows = F.pad(values.permute(0, 2, 3, 1), (0, -inputs % 4)).reshape(groups, out // groups, -1)
    rows = F.pad(rows, (0, -rows.shape[2] % 4, 0, -rows.shape[1] % 16))
    packed = rows.reshape(rows.shape[0], rows.shape[1] // 16, 16, -1, 4).transpose(2, 3).contiguous()
    return packed, rows.sum(2, dtype=torch.int32).reshape(-1)


def padded(scale: torch.Tensor, values: torch.Tensor, groups: int) -> torch.Tensor:
    rows = scale.reshape(1 if groups > 1 and values.shape[0] == groups and values.shape[1] == 1 else groups, -1)
    return F.pad(rows, (0, -rows.shape[1] % 16)).reshape(-1).contiguous()


def convolution(
    x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None, *, stride: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1), groups: int = 1, activation: str = "none", first: bool = False,
    kind: str = "static", step: float = 1.0, zero: int = 0, added: tuple[float, int] = (0.0, 0),
    gives: tuple[float, int] = (0.0, 0), last: bool = True,
) -> torch.Tensor:  # fmt: skip
    packed, sums = pack(values, groups)
    got: torch.Tensor = call(
        "aoti_torch_cpu_untorch_int8_convolution", x, packed, padded(scale, values, groups), sums, Opt(bias),
        Opt(residual), values.shape[0], list(values.shape[2:]), list(stride), list(padding), list(dilation), groups,
        activation, I32(first), kind, step, zero, *added, *gives, I32(last), returns=1,
    )  # fmt: skip
    assert got.is_contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    return got


def integers(x: torch.Tensor, values: torch.Tensor, zero: int, groups: int, **how: Any) -> torch.Tensor:
    """The exact sums, in float64."""
    u = (x.double() - zero) if x.dtype == torch.uint8 else (x.double().round() + zero).clamp(0, 255) - zero
    return F.conv2d(u, values.double(), None, groups=groups, **how)


SHAPES = [
    # channels, outputs, groups, kernel, stride, padding, dilation, size
    (1, 1, 1, (1, 1), (1, 1), (0, 0), (1, 1), (1, 1)),
    (3, 17, 1, (7, 5), (2, 2), (3, 2), (1, 1), (23, 19)),
    (4, 16, 1, (3, 3), (1, 1), (1, 1), (1, 1), (9, 8)),
    (5, 33, 1, (3, 3), (2, 1), (1, 0), (1, 2), (11, 13)),
    (64, 48, 1, (1, 1), (1, 1), (0, 0), (1, 1), (7, 7)),
    (20, 80, 1, (1, 1), (2, 2), (0, 0), (1, 1), (15, 9)),
    (130, 65, 1, (3, 3), (1, 1), (2, 2), (2, 2), (6, 7)),
    (6, 9, 3, (3, 3), (1, 1), (1, 1), (1, 1), (8, 8)),
    (32, 64, 4, (3, 3), (2, 2), (1, 1), (1, 1), (13, 12)),
    (7, 7, 7, (3, 3), (1, 1), (1, 1), (1, 1), (9, 10)),
    (70, 70, 70, (5, 5), (2, 2), (2, 2), (1, 1), (14, 11)),
    (144, 144, 144, (3, 2), (1, 2), (1, 0), (2, 1), (9, 12)),
]


@pytest.mark.parametrize("zero", [0, 1, 128, 255])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_integers(shape: Any, zero: int) -> None:
    """With scales of 1 the result is the integer, at both ends of both ranges: vpmaddubsw would saturate."""
    channels, out, groups, kernel, stride, padding, dilation, size = shape
    torch.manual_seed(zero)
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    for batch in (1, 3):
        x = torch.randint(0, 256, (batch, channels, *size), dtype=torch.uint8)
        values = torch.randint(-128, 128, (out, channels // groups, *kernel), dtype=torch.int8)
        x[0], values[0], values[-1] = 255, 127, -128
        want = integers(x, values, zero, groups, **{k: v for k, v in how.items() if k != "groups"})
        for given_x in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(2, 3).contiguous().mT):
            got = convolution(given_x, values, torch.ones(out), zero=zero, **how)
            # float32 rounds integers from 2^24 on.
            assert torch.equal(got, want.float())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drawn(data: st.DataObject) -> None:
    """Scales, bias, activation and residual in float32 and in bytes; the bytes are those of separate roundings."""
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 2**31)))
    groups, per_group = draw(st.sampled_from([(1, None), (1, None), (2, None), (37, 1), (90, 1)]))
    channels, out = (
        (groups, groups) if per_group else (groups * draw(st.integers(1, 21)), groups * draw(st.integers(1, 50)))
    )
    two = st.tuples(st.integers(1, 3), st.integers(1, 3))
    how: dict[str, Any] = {"stride": draw(two), "padding": draw(two), "dilation": draw(two)}
    values = torch.randint(-128, 128, (out, channels // groups, *draw(two)), dtype=torch.int8)
    x = torch.randint(0, 256, (draw(st.integers(1, 2)), channels, 9, 11), dtype=torch.uint8)
    step, zero = 0.03125, draw(st.integers(0, 255))
    sums = integers(x, values, zero, groups, **how).float()
    if draw(st.booleans()):  # the same from float32
        x = (x.float() - zero) * step
    scale = torch.rand(out) / 256
    bias = torch.randn(out) if draw(st.booleans()) else None
    residual, added = None, (0.0, 0)
    kind = draw(st.sampled_from(["none", "float", "bytes"]))
    if kind == "float":
        residual = torch.randn(sums.shape)
    elif kind == "bytes":
        residual, added = torch.randint(0, 256, sums.shape, dtype=torch.uint8), (0.02, draw(st.integers(0, 255)))
    activation, first = draw(st.sampled_from(list(FUNCTIONS))), draw(st.booleans())
    gives = (0.05, draw(st.integers(0, 255))) if draw(st.booleans()) else (0.0, 0)
    got = convolution(
        x, values, scale, bias, residual, groups=groups, activation=activation, first=first, step=step, zero=zero,
        added=added, gives=gives, last=draw(st.booleans()), **how,
    )  # fmt: skip
    clamps = activation in ("none", "relu", "relu6") and (residual is None or first or activation == "none")
    unit = torch.tensor(gives[0] if gives[0] and clamps else 1.0)
    y = sums * (torch.tensor(step) * scale / unit).reshape(-1, 1, 1)
    y = y + (torch.zeros(out) if bias is None else bias / unit).reshape(-1, 1, 1)
    other = torch.zeros(())
    if residual is not None:
        factor = torch.tensor(added[0] if kind == "bytes" else 1.0) / unit
        other = (residual.int() - added[1] if kind == "bytes" else residual).float() * factor
    if clamps:
        y = y + other
        y = y.clamp(min=0) if activation != "none" else y
        y = y.clamp(max=float(torch.tensor(6.0) / unit)) if activation == "relu6" else y
    else:
        y = FUNCTIONS[activation](y + other) if first else FUNCTIONS[activation](y) + other
    if not gives[0]:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, y, rtol=2e-6, atol=2e-5)
        return
    assert got.dtype == torch.uint8
    steps = y if clamps else y * (1 / torch.tensor(gives[0]))
    want = (steps.clamp(-1000, 1000).round() + gives[1]).clamp(0, 255)
    # Other activations differ in their last digits.
    assert (got.float() - want).abs().max() <= (0 if clamps else 1)


def test_saturation_and_values_that_are_not_finite() -> None:
    x = torch.tensor([1e30, -1e30, 300.0, -300.0, INF, -INF, NAN, 1.0]).reshape(1, 8, 1, 1)
    values = torch.eye(8, dtype=torch.int8).reshape(8, 8, 1, 1)
    got = convolution(x, values, torch.ones(8), zero=100)
    assert got.flatten().tolist() == [155.0, -100.0, 155.0, -100.0, 155.0, -100.0, 0.0, 1.0]
    bias = torch.tensor([1e30, -1e30, 300.0, -300.0, 3e38, -3e38, NAN, 1.0])
    for outputs in (8, 32):  # in memory, and in registers
        repeat = outputs // 8
        many = torch.zeros(outputs, 8, 1, 1, dtype=torch.int8)
        got = convolution(torch.zeros(1, 8, 1, 1), many, torch.ones(outputs), bias.repeat(repeat), gives=(1.0, 7))
        assert got.flatten().tolist() == [255, 0, 255, 0, 255, 0, 0, 8] * repeat


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric"])
def test_dynamic_ranges_of_images(kind: str) -> None:
    """Each image by itself: neither an outlier nor NaN in another one changes it."""
    torch.manual_seed(0)
    x = torch.randint(-100, 101, (3, 6, 5, 7)).float()
    x[:, 0, 0, 0], x[:, 0, 0, 1] = (-127, 128) if kind == "asymmetric" else (-127, 127)
    values = torch.randint(-128, 128, (20, 6, 3, 3), dtype=torch.int8)
    want = F.conv2d(x.double(), values.double(), None, 1, 1).float()
    for given_x in (x, x.contiguous(memory_format=torch.channels_last), torch.randn(3, 9, 5, 7)[:, :6].copy_(x)):
        assert torch.equal(convolution(given_x, values, torch.ones(20), padding=(1, 1), kind=kind), want)
    for bad in (NAN, INF, -INF):
        x[1, 3, 2, 2] = bad
        got = convolution(x, values, torch.ones(20), padding=(1, 1), kind=kind)
        assert torch.isnan(got[1]).all()
        assert torch.equal(got[[0, 2]], want[[0, 2]])


def test_one_range_for_all_images() -> None:
    torch.manual_seed(0)
    x = torch.randint(-127, 129, (3, 6, 5, 7)).float()
    x[0, 0, 0, 0], x[2, 1, 3, 3] = -127, 128
    values = torch.randint(-128, 128, (20, 6, 3, 3), dtype=torch.int8)
    want = F.conv2d(x.double(), values.double(), None, 1, 1).float()
    for given_x in (x, x.contiguous(memory_format=torch.channels_last)):
        got = convolution(given_x, values, torch.ones(20), padding=(1, 1), kind="tensor", step=2.0**-126)
        assert torch.equal(got, want)
    assert not convolution(x / 1e6, values, torch.ones(20), padding=(1, 1), kind="tensor", step=1.0).any()
    for bad in (NAN, INF, -INF):
        x[1, 3, 2, 2] = bad
        assert torch.isnan(convolution(x, values, torch.ones(20), padding=(1, 1), kind="tensor", step=1.0)).all()


def test_no_images_and_one_pixel() -> None:
    values = torch.ones(20, 8, 1, 1, dtype=torch.int8)
    assert convolution(torch.ones(0, 8, 4, 4), values, torch.ones(20)).shape == (0, 20, 4, 4)
    wide = torch.ones(20, 8, 5, 4, dtype=torch.int8)
    assert convolution(torch.ones(2, 8, 5, 4), wide, torch.ones(20)).tolist() == [[[[160.0]]] * 20] * 2


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit() -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import torch, hashlib\n"
        "from tests.native.test_int8_convolution import convolution\n"
        "torch.manual_seed(0)\n"
        "for groups, c, o, k in ((1, 64, 200, 3), (8, 64, 128, 3), (96, 96, 96, 5)):\n"
        "    values = torch.randint(-127, 128, (o, c // groups, k, k), dtype=torch.int8)\n"
        "    y = convolution(torch.randn(2, c, 30, 30), values, torch.rand(o), torch.randn(o), groups=groups,\n"
        "                    padding=(1, 1), activation='silu', kind='asymmetric')\n"
        "    print(hashlib.sha256(y.numpy().tobytes()).hexdigest())\n"
    )
    outputs = set()
    for threads in ("1", "2", "3"):
        env = {**os.environ, "OMP_NUM_THREADS": threads, "UNTORCH_LIBRARY": library_path()}
        command = [sys.executable, "-c", script, str(ROOT)]
        outputs.add(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 3


def pool(x: torch.Tensor, output: list[int], kernel: Any, stride: Any, padding: Any, dilation: Any) -> torch.Tensor:
    lists = [list(pair) for pair in (kernel, stride, padding, dilation)]
    got: torch.Tensor = call("aoti_torch_cpu_untorch_byte_max_pool", x, output, *lists, I32(True), returns=1)
    return got


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("channels", [1, 15, 64, 100])
def test_pool(channels: int, ceil_mode: bool) -> None:
    x = torch.randint(0, 256, (2, channels, 13, 12), dtype=torch.uint8)
    for how in (((3, 3), (2, 2), (1, 1), (1, 1)), ((2, 3), (3, 1), (1, 0), (2, 2)), ((1, 1), (2, 2), (0, 0), (1, 1))):
        want = F.max_pool2d(x.float(), *how, ceil_mode=ceil_mode)
        for given_x in (x, x.contiguous(memory_format=torch.channels_last)):
            got = pool(given_x, list(want.shape[2:]), *how)
            assert got.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(got.float(), want)


def test_pool_refuses() -> None:
    with pytest.raises(ShimError, match=r"^byte_max_pool: argument 'x' must be uint8 and 4-D, got float32 of shape "):
        pool(torch.ones(1, 2, 3, 3), [3, 3], (1, 1), (1, 1), (0, 0), (1, 1))
    with pytest.raises(ShimError, match=r"^byte_max_pool: argument 'stride' must be at least 1, got \[0, 1\]$"):
        pool(torch.ones(1, 2, 3, 3, dtype=torch.uint8), [3, 3], (1, 1), (0, 1), (0, 0), (1, 1))


def arguments(**changed: Any) -> list[Any]:
    packed, sums = pack(torch.ones(20, 6, 3, 3, dtype=torch.int8), 1)
    given = {
        "x": torch.ones(1, 6, 5, 5), "weight": packed, "scale": torch.ones(32), "column_sums": sums,
        "bias": torch.ones(20), "residual": torch.ones(1, 20, 3, 3), "out_channels": 20, "kernel": [3, 3],
        "stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1, "activation": "none",
        "residual_first": I32(0), "input_range": "static", "input_scale": 1.0, "input_zero": 0,
        "residual_scale": 0.0, "residual_zero": 0, "output_scale": 0.0, "output_zero": 0, "channels_last": I32(1),
    }  # fmt: skip
    given |= changed
    given["bias"], given["residual"] = Opt(given["bias"]), Opt(given["residual"])
    return list(given.values())


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.ones(1, 6, 5, 5).double()}, "argument 'x' must be float32 or uint8, got float64"),
    ({"x": torch.ones(6, 5, 5)}, "argument 'x' must be 4-D, got shape [6, 5, 5]"),
    ({"groups": 4}, "6 → 20 channels do not divide into 4 groups"),
    ({"kernel": [3]}, "argument 'kernel' must have 2 values, got 1"),
    ({"kernel": [3, 7]}, "the kernel is larger than the padded input [1, 6, 5, 5]"),
    ({"x": torch.ones(1, 7282, 3, 3)},
     "an output has 65538 weights, the sums of more than 65536 do not fit int32"),
    ({"x": torch.ones(1, 9, 5, 5)},
     "argument 'weight' must be int8 with 3456 elements for 9 → 20 channels, got int8 of shape [1, 2, 18, 16, 4]"),
    ({"scale": torch.ones(20)}, "argument 'scale' must be float32 of shape [32], got float32 of shape [20]"),
    ({"column_sums": torch.ones(32)},
     "argument 'column_sums' must be int32 of shape [32], got float32 of shape [32]"),
    ({"bias": torch.ones(32)}, "argument 'bias' must be float32 of shape [20], got float32 of shape [32]"),
    ({"residual": torch.ones(1, 20, 5, 5)},
     "argument 'residual' must have shape [1, 20, 3, 3], got [1, 20, 5, 5]"),
    ({"residual": torch.ones(1, 20, 3, 3).half()}, "argument 'residual' must be float32 or uint8, got float16"),
    ({"residual": torch.ones(1, 20, 3, 3, dtype=torch.uint8)}, "residual_scale must be above 0 and finite, got 0"),
    ({"input_range": "row"}, "input_range 'row' is not supported, expected asymmetric, symmetric, static or tensor"),
    ({"input_range": "tensor", "input_scale": 0.0}, "input_scale, the least scale, must be at least 2^-126 and finite, got 0"),
    ({"x": torch.ones(1, 6, 5, 5, dtype=torch.uint8), "input_range": "symmetric"},
     "argument 'x' is uint8, which has a static range, got 'symmetric'"),
    ({"input_scale": NAN}, "input_scale must be above 0 and finite, got nan"),
    ({"input_zero": 256}, "input_zero must be 0 to 255, got 256"),
    ({"output_scale": -1.0}, "output_scale must be above 0 and finite, got -1"),
    ({"output_scale": 1.0, "output_zero": -1}, "output_zero must be 0 to 255, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "text"), REFUSALS)
def test_refusals(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ShimError) as error:
        call("aoti_torch_cpu_untorch_int8_convolution", *arguments(**changed), returns=1)
    assert str(error.value) == f"int8_convolution: {text}"


def test_large_depthwise_kernels_are_refused() -> None:
    packed, sums = pack(torch.ones(2, 1, 33, 32, dtype=torch.int8), 2)
    given = arguments(
        x=torch.ones(1, 2, 40, 40), weight=packed, scale=torch.ones(16), column_sums=sums, bias=None, residual=None,
        out_channels=2, kernel=[33, 32], groups=2,
    )  # fmt: skip
    with pytest.raises(ShimError, match="^int8_convolution: a depthwise kernel may have 256 elements, got 1056$"):
        call("aoti_torch_cpu_untorch_int8_convolution", *given, returns=1)
