"""The packed convolution: eager PyTorch on the plain weight is the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import shim
from tests.native.instruction_sets import skip_if_own
from tests.native.shim import I32, Opt, ShimError, call
from untorch.ops.packed_convolution import pack_small_groups_weight, pack_winograd_weight

OPERATOR = "aoti_torch_cpu_untorch_packed_convolution"
BLOCK = 16


def pack(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """[O, C, kh, kw] as the kernels take it: panels of 16 output channels, or of 16 channels of a depthwise one."""
    o, c, kh, kw = weight.shape
    if groups > 1 and c == 1 and o == groups:
        padded = torch.zeros(-(-o // BLOCK) * BLOCK, kh * kw)
        padded[:o] = weight.reshape(o, -1)
        return padded.reshape(-1, BLOCK, kh * kw).transpose(1, 2).contiguous()
    outputs = o // groups
    padded = torch.zeros(groups, -(-outputs // BLOCK) * BLOCK, kh * kw * c)
    padded[:, :outputs] = weight.permute(0, 2, 3, 1).reshape(groups, outputs, -1)
    return padded.reshape(groups, -1, BLOCK, kh * kw * c).transpose(2, 3).contiguous()


def pack_pairs(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """bfloat16: two neighbouring channels of an output beside each other."""
    packed = pack(weight, groups)
    return packed.reshape(*packed.shape[:2], -1, 2, BLOCK).transpose(-2, -1).contiguous().bfloat16()


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    activation: str = "none",
    residual_first: bool = False,
    channels_last: bool = True,
    winograd: bool = False,
    bf16: bool = False,
    small_groups: bool = False,
) -> torch.Tensor:
    kernel = list(weight.shape[2:])
    packed = pack_winograd_weight(weight) if winograd else (pack_pairs if bf16 else pack)(weight, groups)
    packed = pack_small_groups_weight(weight) if small_groups else packed
    result: torch.Tensor = call(
        OPERATOR, x, packed, Opt(bias), Opt(residual), weight.shape[0], kernel, list(stride),
        list(padding), list(dilation), groups, activation, I32(int(residual_first)), I32(int(channels_last)), I32(int(winograd)), returns=1,
    )  # fmt: skip
    return result


def images(n: int, c: int, h: int, w: int) -> torch.Tensor:
    return torch.randn(n, c, h, w).to(memory_format=torch.channels_last)


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any) -> torch.Tensor:
    """Eager's convolution, computed in float64.

    torch 2.13's float32 kernels crash on some padded 1 x 1 convolutions with groups, and are wrong for some of one
    channel that is channels last.
    """
    return F.conv2d(x.double(), weight.double(), None if bias is None else bias.double(), *options).float()


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_matches_eager(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    c = groups * draw(st.sampled_from([1, 2, 3, 7, 8, 9, 16, 33]))
    o = groups * draw(st.sampled_from([1, 3, 15, 16, 17, 32, 50, 70]))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    least = [max(1, dilation[d] * (kernel[d] - 1) + 1 - 2 * padding[d]) for d in (0, 1)]
    h, w = (draw(st.integers(least[d], least[d] + 20)) for d in (0, 1))
    x = torch.randn(draw(st.integers(1, 3)), c, h, w)
    if draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    weight = torch.randn(o, c // groups, *kernel) / (c * kernel[0] * kernel[1]) ** 0.5
    bias = torch.randn(o) if draw(st.booleans()) else None
    expected = exact(x, weight, bias, stride, padding, dilation, groups)
    residual = torch.randn_like(expected) if draw(st.booleans()) else None
    first = draw(st.booleans())
    if residual is not None and first:
        expected = expected + residual
    expected = torch.relu(expected)
    if residual is not None and not first:
        expected = expected + residual
    assert_close(run(x, weight, bias, residual, stride, padding, dilation, groups, "relu", first), expected)


@settings(max_examples=60, deadline=None)
@given(
    channels=st.sampled_from([2, 7, 16, 24, 64, 72, 100, 130]),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (7, 7), (1, 5), (3, 1)]),
    stride=st.integers(1, 2),
    dilation=st.integers(1, 2),
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 99),
)
def test_depthwise(
    channels: int, kernel: tuple[int, int], stride: int, dilation: int, size: tuple[int, int], seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight, bias = images(2, channels, *size), torch.randn(channels, 1, *kernel), torch.randn(channels)
    padding = (dilation * (kernel[0] // 2), dilation * (kernel[1] // 2))
    expected = F.conv2d(x, weight, bias, stride, padding, dilation, channels)
    residual = torch.randn_like(expected)
    got = run(x, weight, bias, residual, (stride, stride), padding, (dilation, dilation), channels)
    assert_close(got, expected + residual)


@pytest.mark.parametrize("side", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [8, 24, 32, 40, 200])
@pytest.mark.parametrize("size", [(7, 7), (12, 9), (5, 33), (30, 17), (3, 4)])
def test_depthwise_tiles(side: int, stride: int, channels: int, size: tuple[int, int]) -> None:
    """Tiles inside and at both edges, kernel rows outside of the image, whole vectors and half ones."""
    torch.manual_seed(0)
    x, weight, bias = images(2, channels, *size), torch.randn(channels, 1, side, side), torch.randn(channels)
    for padding in (0, side // 2, side - 1):
        if min(size) + 2 * padding < side:
            continue
        y = exact(x, weight, bias, stride, padding, 1, channels)
        options: Any = {"stride": (stride, stride), "padding": (padding, padding), "groups": channels}
        assert_close(run(x, weight, bias, None, activation="relu6", **options), F.relu6(y))
        residual = torch.randn_like(y)
        assert_close(run(x, weight, bias, residual, activation="silu", **options), F.silu(y) + residual)
        first = run(x, weight, bias, residual, activation="relu", residual_first=True, **options)
        assert_close(first, F.relu(y + residual))


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels", [16, 48, 208])
@pytest.mark.parametrize("size", [(7, 7), (12, 9), (5, 33), (1, 17), (3, 2), (20, 1)])
def test_small_groups(group: int, stride: int, channels: int, size: tuple[int, int]) -> None:
    """Tiles of all widths, inside and at both edges, kernel rows outside of the image."""
    torch.manual_seed(0)
    groups = channels // group
    x, weight, bias = images(2, channels, *size), torch.randn(channels, group, 3, 3), torch.randn(channels)
    for padding in (0, 1, 2, 4):
        if min(size) + 2 * padding < 3:
            continue
        y = exact(x, weight, bias, stride, padding, 1, groups)
        options: Any = {
            "stride": (stride, stride), "padding": (padding, padding), "groups": groups, "small_groups": True
        }  # fmt: skip
        assert_close(run(x, weight, None, None, **options), y - bias[:, None, None])
        assert_close(run(x, weight, bias, None, activation="relu6", **options), F.relu6(y))
        residual = torch.randn_like(y)
        assert_close(run(x, weight, bias, residual, activation="silu", **options), F.silu(y) + residual)
        rows = run(
            x.contiguous(),
            weight,
            bias,
            residual,
            activation="relu",
            residual_first=True,
            channels_last=False,
            **options,
        )
        assert_close(rows, F.relu(y + residual))


def test_small_groups_keep_nan_and_infinity_to_themselves() -> None:
    x, weight = images(1, 32, 9, 9), torch.randn(32, 4, 3, 3)
    x[0, 5, 4, 4], x[0, 30, 0, 0] = torch.nan, torch.inf
    got = run(x, weight, padding=(1, 1), groups=8, small_groups=True)
    want = exact(x, weight, None, 1, 1, 1, 8)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert not got[:, :4].isnan().any() and got[:, 4:8].isnan().any()


@pytest.mark.parametrize(("channels", "size"), [(512, 14), (16, 60), (144, 28)])
def test_small_groups_do_not_depend_on_the_number_of_threads(channels: int, size: int) -> None:
    x, weight, results = images(1, channels, size, size), torch.randn(channels, 8, 3, 3), []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(run(x, weight, padding=(1, 1), groups=channels // 8, activation="hardswish", small_groups=True))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(("channels", "size"), [(512, 14), (16, 60), (136, 28)])
def test_depthwise_does_not_depend_on_the_number_of_threads(channels: int, size: int) -> None:
    x, weight, results = images(1, channels, size, size), torch.randn(channels, 1, 5, 5), []
    for threads in (1, 2, 3, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(run(x, weight, padding=(2, 2), groups=channels, activation="hardswish"))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("none", lambda x: x),
        ("relu", torch.relu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("silu", F.silu),
        ("tanh", torch.tanh),
        ("sigmoid", torch.sigmoid),
        ("relu6", F.relu6),
        ("hardswish", F.hardswish),
        ("hardsigmoid", F.hardsigmoid),
    ],
)
@pytest.mark.parametrize("groups", [1, 20])
def test_activations(name: str, function: Any, groups: int) -> None:
    torch.manual_seed(0)
    x, weight = images(1, 20, 9, 9), 4 * torch.randn(20, 20 // groups, 3, 3)
    assert_close(run(x, weight, groups=groups, activation=name), function(F.conv2d(x, weight, groups=groups)))


@pytest.mark.parametrize("groups", [1, 4, 40])
@pytest.mark.parametrize("channels_last", [True, False])
def test_memory_format(groups: int, channels_last: bool) -> None:
    x, weight = images(2, 40, 6, 5), torch.randn(40, 40 // groups, 3, 3)
    got = run(x, weight, groups=groups, channels_last=channels_last)
    form = torch.channels_last if channels_last else torch.contiguous_format
    assert got.is_contiguous(memory_format=form)
    assert_close(got, F.conv2d(x, weight, groups=groups))


@settings(max_examples=60, deadline=None)
@given(
    c=st.sampled_from([16, 32, 48, 64, 144]),
    o=st.sampled_from([16, 32, 48, 80]),
    size=st.tuples(st.integers(1, 25), st.integers(1, 25)),
    padding=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    activation=st.sampled_from(["none", "relu", "silu"]),
    with_residual=st.booleans(),
    first=st.booleans(),
    seed=st.integers(0, 99),
)
def test_winograd(
    c: int,
    o: int,
    size: tuple[int, int],
    padding: tuple[int, int],
    activation: str,
    with_residual: bool,
    first: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x, weight, bias = images(2, c, *size), torch.randn(o, c, 3, 3) / (3 * c**0.5), torch.randn(o)
    function = {"none": lambda y: y, "relu": torch.relu, "silu": F.silu}[activation]
    y = F.conv2d(x, weight, bias, padding=padding)
    residual = torch.randn_like(y) if with_residual else None
    added = torch.zeros(()) if residual is None else residual
    expected = function(y + added) if first else function(y) + added
    got = run(x, weight, bias, residual, padding=padding, activation=activation, residual_first=first, winograd=True)
    assert_close(got, expected)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Values of bfloat16, in float32."""
    return x.bfloat16().float()


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_bfloat16_weights(data: st.DataObject) -> None:
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 99)))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    c = groups * draw(st.sampled_from([2, 10, 14, 16, 34, 48, 184, 800, 1602]))
    o = groups * draw(st.sampled_from([1, 3, 8, 15, 16, 17, 24, 32, 50, 70]))
    pointwise = c <= 8 or draw(st.booleans())
    kernel = (1, 1) if pointwise else draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    least = [max(1, dilation[d] * (kernel[d] - 1) + 1 - 2 * padding[d]) for d in (0, 1)]
    h, w = (draw(st.integers(least[d], least[d] + 14)) for d in (0, 1))
    x = rounded(torch.randn(draw(st.integers(1, 3)), c, h, w))
    if draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    weight = rounded(torch.randn(o, c // groups, *kernel) / (c * kernel[0] * kernel[1]) ** 0.5)
    bias = torch.randn(o) if draw(st.booleans()) else None
    expected = exact(x, weight, bias, stride, padding, dilation, groups)
    residual = torch.randn_like(expected) if draw(st.booleans()) else None
    first = draw(st.booleans())
    name = draw(st.sampled_from(["none", "relu", "silu"]))
    function = {"none": lambda y: y, "relu": torch.relu, "silu": F.silu}[name]
    added = torch.zeros(()) if residual is None else residual
    expected = function(expected + added) if first else function(expected) + added
    got = run(x, weight, bias, residual, stride, padding, dilation, groups, name, first, bf16=True)
    assert_close(got, expected)


def test_bfloat16_weights_with_inputs_of_float32() -> None:
    """They are rounded at most, and sums are float32."""
    torch.manual_seed(0)
    x, weight = images(2, 512, 9, 9), rounded(torch.randn(40, 512, 3, 3) / 70)
    got = run(x, weight, padding=(1, 1), bf16=True)
    torch.testing.assert_close(got, F.conv2d(x, weight, padding=1), rtol=0, atol=0.02)
    part = images(2, 48, 12, 12)[:, 8:40, 1:10, 2:11]
    weight = rounded(torch.randn(24, 32, 1, 1) / 6)
    for stride in (1, 2):
        expected = F.conv2d(rounded(part), weight, stride=stride)
        got = run(rounded(part), weight, stride=(stride, stride), bf16=True)
        assert_close(got, expected)


@pytest.mark.parametrize(("channels", "out_channels"), [(24, 40), (64, 1), (256, 33)])
def test_blocks_of_pixels_with_bfloat16_weights(channels: int, out_channels: int) -> None:
    """1×1 kernels, of which each block rounds its own pixels where there are enough for all threads."""
    x = rounded(images(2, channels + 16, 33, 41))[:, 8 : 8 + channels]
    weight, bias = rounded(torch.randn(out_channels, channels, 1, 1) / channels**0.5), torch.randn(out_channels)
    residual, results = torch.randn(2, out_channels, 33, 41), []
    for threads in (1, 2, 5):
        shim.lib.utp_set_num_threads(threads)
        results.append(run(x, weight, bias, residual, activation="relu", bf16=True))
    shim.lib.utp_set_num_threads(2)
    assert all(torch.equal(result, results[0]) for result in results[1:])
    assert_close(results[0], torch.relu(exact(x, weight, bias, (1, 1), (0, 0), (1, 1), 1)) + residual)


def test_bfloat16_weights_keep_nan_and_infinity() -> None:
    x, weight = images(1, 16, 5, 5), torch.ones(16, 16, 3, 3)
    x[0, 3, 2, 2], x[0, 5, 0, 0] = torch.nan, torch.inf
    got, expected = run(x, weight, padding=(1, 1), bf16=True), F.conv2d(x, weight, padding=1)
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
    assert run(x[:0], weight, bf16=True).shape == (0, 16, 3, 3)


def test_winograd_is_as_exact_as_direct_kernels() -> None:
    torch.manual_seed(0)
    x, weight = images(1, 256, 28, 28), torch.randn(64, 256, 3, 3) / 48
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    errors = [(run(x, weight, padding=(1, 1), winograd=w).double() - exact).abs().max().item() for w in (False, True)]
    assert errors[1] < 4 * errors[0] + 1e-7


def test_large_reductions_run_in_blocks() -> None:
    torch.manual_seed(0)
    for channels in (300, 800, 1700):
        x, weight = images(1, channels, 7, 7), torch.randn(40, channels, 3, 3) / channels
        residual = images(1, 40, 7, 7)
        expected = torch.relu(F.conv2d(x, weight, padding=1) + residual)
        assert_close(run(x, weight, None, residual, padding=(1, 1), activation="relu", residual_first=True), expected)


def test_strided_pixels_are_read_in_place() -> None:
    """A slice of the channels, and one of the image."""
    x, weight = images(2, 48, 12, 12)[:, 8:40, 1:10, 2:11], torch.randn(16, 32, 3, 3)
    assert_close(run(x, weight, padding=(1, 1)), F.conv2d(x, weight, padding=1))
    few = images(2, 8, 12, 12)[:, 1:4, 1:10, 2:11]
    weight = torch.randn(16, 3, 3, 3)
    assert_close(run(few, weight, padding=(1, 1)), F.conv2d(few, weight, padding=1))


def test_empty_batch_and_nan() -> None:
    weight = torch.randn(16, 16, 3, 3)
    assert run(images(1, 16, 5, 5)[:0], weight).shape == (0, 16, 3, 3)
    x = images(1, 16, 5, 5)
    x[0, 3, 2, 2] = torch.nan
    got = run(x, weight, padding=(1, 1), activation="relu")
    assert torch.equal(got.isnan(), F.conv2d(x, weight, padding=1).isnan())


_THREADS = """
import sys, torch
from tests.native.test_packed_convolution import run
torch.manual_seed(0)
out = []
for c, o, k, g, size in ((64, 96, 3, 1, 28), (256, 128, 3, 1, 7), (96, 96, 5, 96, 30), (64, 64, 3, 4, 20),
                         (3, 32, 7, 1, 64), (64, 256, 1, 1, 28)):
    x = torch.randn(2, c, size, size).to(memory_format=torch.channels_last)
    out.append(run(x, torch.randn(o, c // g, k, k), torch.randn(o), padding=(k // 2, k // 2), groups=g))
x = torch.randn(2, 64, 21, 30).to(memory_format=torch.channels_last)
out.append(run(x, torch.randn(96, 64, 3, 3), torch.randn(96), padding=(1, 1), winograd=True))
for group, stride in ((4, 1), (4, 2), (8, 1), (8, 2)):
    x = torch.randn(2, 48, 21, 30).to(memory_format=torch.channels_last)
    out.append(run(x, torch.randn(48, group, 3, 3), torch.randn(48), None, (stride, stride), (1, 1),
                   groups=48 // group, small_groups=True))
for c, o, k, g, size, stride in ((64, 96, 3, 1, 28, 1), (250, 56, 3, 1, 7, 1), (64, 72, 3, 4, 20, 2),
                                 (64, 250, 1, 1, 28, 1), (1602, 40, 1, 1, 9, 2)):
    x = torch.randn(2, c, size, size).to(memory_format=torch.channels_last).bfloat16().float()
    weight = torch.randn(o, c // g, k, k).bfloat16().float()
    out.append(run(x, weight, torch.randn(o), None, (stride, stride), (k // 2, k // 2), groups=g, bf16=True))
torch.save(out, sys.argv[1])
"""


def _run_with(path: Path, **environment: str) -> list[torch.Tensor]:
    root = Path(__file__).resolve().parents[2]
    path_of_modules = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **environment, "PYTHONPATH": path_of_modules}
    subprocess.run([sys.executable, "-c", _THREADS, str(path)], check=True, env=env, cwd=root)
    values: list[torch.Tensor] = torch.load(path)
    return values


@pytest.fixture(scope="module")
def one_thread(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    """What this CPU's own kernels compute."""
    return _run_with(tmp_path_factory.mktemp("one") / "thread", OMP_NUM_THREADS="1")


@pytest.mark.slow
@pytest.mark.unsanitized
def test_the_number_of_threads_does_not_change_a_bit(one_thread: list[torch.Tensor], tmp_path: Path) -> None:
    three = _run_with(tmp_path / "3", OMP_NUM_THREADS="3")
    assert all(torch.equal(a, b) for a, b in zip(one_thread, three, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "v3", "v4"])
def test_every_level_of_instructions_and_number_of_threads(
    isa: str, one_thread: list[torch.Tensor], tmp_path: Path
) -> None:
    skip_if_own(isa)
    one = _run_with(tmp_path / "1", UNTORCH_ISA=isa, OMP_NUM_THREADS="1")
    three = _run_with(tmp_path / "3", UNTORCH_ISA=isa, OMP_NUM_THREADS="3")
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    for got, expected in zip(one, one_thread, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 8, 8)}, r"argument 'x' must be 4-D, got shape \[4, 8, 8\]"),
        ({"x": torch.zeros(1, 4, 8, 8).double()}, "argument 'x' must be float32, got float64"),
        ({"groups": 8}, "4 → 16 channels do not divide into 8 groups"),
        ({"stride": (0, 1)}, r"argument 'stride' must be at least 1, got \[0, 1\]"),
        ({"padding": (-1, 0)}, r"argument 'padding' must be at least 0, got \[-1, 0\]"),
        ({"dilation": (8, 1)}, r"the kernel is larger than the padded input \[1, 4, 8, 8\]"),
        ({"x": torch.zeros(1, 5, 8, 8)}, r"argument 'weight' must have 720 elements for 5 → 16 channels"),
        ({"bias": torch.zeros(3)}, r"argument 'bias' must have shape \[16\], got \[3\]"),
        ({"residual": torch.zeros(1, 16, 8, 8)}, r"argument 'residual' must have shape \[1, 16, 6, 6\]"),
        (
            {"winograd": True},
            "argument 'winograd' needs a 3×3 kernel, stride and dilation 1, no groups and multiples of",
        ),
        ({"bf16": True}, "argument 'weight' of bfloat16 needs an even number of channels, more than 8 unless the"),
        ({"activation": "mish"}, "activation 'mish' is not supported, expected none, relu"),
    ],
)
def test_refusals(change: dict[str, Any], message: str) -> None:
    x, weight = change.get("x", torch.zeros(1, 4, 8, 8)), torch.zeros(16, 4, 3, 3)
    changed = {name: value for name, value in change.items() if name != "x"}
    with pytest.raises(ShimError, match=f"packed_convolution: {message}"):
        run(x, weight, **changed)
