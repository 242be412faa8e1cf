"""Linear layers with 8-bit weights on the GPU: int8, FP8 with a scale an output, FP8 with scales of blocks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.captured import captured
from tests.native.operands import drawn_rows
from tests.native.shim import Opt, call
from tests.native.w8_weights import BF16, E4M3, F16, F32, I8, KINDS, random_w8
from untorch.ops.w8a8 import EXACT_M, SCALE_BLOCK, dequantize_w8, round_rows

LINEAR = "aoti_torch_cuda_w8a8_linear"
DTYPES = [BF16, F16, F32]
ROUNDING = {F32: 2.0**-20, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
SIZES = [(16, 16), (144, 1040), (6160, 4096), (1040, 12304), (4096, 2048), (24592, 256)]  # n, k
SUMS = {I8: 2.0**-20, E4M3: 2.0**-10}  # of sums, by their size; tensor cores drop bits of FP8's


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def linear(
    x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], bias: torch.Tensor | None = None
) -> torch.Tensor:
    added = None if bias is None else bias.cuda()
    got: torch.Tensor = call(LINEAR, x, weight[0].cuda(), weight[1].cuda(), Opt(added), returns=1)
    return got


def rounds(x: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether rows of x are rounded to 8 bits."""
    capability = torch.cuda.get_device_capability()
    if x.shape[:-1].numel() <= EXACT_M:
        return False
    if weight[0].dtype == I8:
        return True
    return capability >= (8, 9) if weight[1].dim() == 1 else capability == (9, 0)


def check(
    got: torch.Tensor,
    x: torch.Tensor,
    weight: tuple[torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None = None,
) -> None:
    """The sums of the values that are multiplied, up to the rounding of the result."""
    values, scale = weight
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], values.shape[0]), x.dtype, True)
    width = x.shape[-1]
    rows = x.double().cpu()
    dense = dequantize_w8(values.cuda(), scale.cuda(), torch.float64)[:, :width]
    if rounds(x, weight):
        rows = round_rows(x.cpu(), values.dtype, width if scale.dim() == 1 else SCALE_BLOCK)
        sums = SUMS[values.dtype]
        # A value may lie on the border between two roundings: the kernel's quotient differs in its last bit.
        step = x.double().cpu().abs().amax(-1, keepdim=True) * (1 / 127 if values.dtype == I8 else 1 / 16) * 2.0**-12
    else:
        # The weight is rounded to x's dtype where there is no GEMM for scales of blocks.
        sums = 2.0**-18 if x.dtype == F32 else SUMS[values.dtype]
        if x.shape[:-1].numel() > EXACT_M:
            sums = max(ROUNDING[x.dtype], sums)
        # 16 bits of a row for int8; 8 significant ones for FP8, which bfloat16 has.
        step = rows.abs().amax(-1, keepdim=True) * 2.0**-15
        sums += 2.0**-9 if x.dtype == F16 and values.dtype == E4M3 else 0
    sums_of_steps = step.cuda() * dense.abs().sum(1)
    rows, added = rows.cuda(), torch.zeros(1).double() if bias is None else bias.double()
    want, size = rows @ dense.t() + added.cuda(), rows.abs() @ dense.abs().t() + added.abs().cuda()
    apart = (got.double() - want).abs()
    least = torch.finfo(x.dtype).smallest_normal
    assert not got.isnan().any()
    assert torch.all(apart <= want.abs() * ROUNDING[x.dtype] + size * sums + sums_of_steps + least)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 2, 3, 8, 9, 10, 12, 16, 33, 64, 129, 512, 1027])
def test_every_m(m: int, kind: str) -> None:
    for dtype, n, k in [(BF16, 1024, 1024), (F16, 272, 2304), (F32, 128, 256)]:
        weight, x, bias = random_w8(n, k, kind), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), weight, bias), x, weight, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [1, 5, 40])
@pytest.mark.parametrize(
    ("n", "k"), [(16, 16), (16, 4096), (48, 1040), (4096, 4096), (14336, 256), (128, 14336), (1040, 12304), (6144, 64)]
)
def test_sizes(n: int, k: int, m: int, kind: str) -> None:
    weight, x, bias = random_w8(n, k, kind), random(m, k, dtype=BF16), random(n, dtype=BF16)
    check(linear(x.cuda(), weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [9, 31, 64, 100, 129, 193, 256, 400, 700, 2100])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_int8_sums_are_exact(n: int, k: int, m: int, dtype: torch.dtype) -> None:
    """int32 sums, scaled in float32 and rounded once: tiles, their tails, and those that several CTAs share."""
    weight, x = random_w8(n, k, "int8"), random(m, k, dtype=dtype)
    values, scale = weight[0].cuda(), weight[1].cuda()
    largest = x.float().abs().amax(-1, keepdim=True)
    steps = x.float() * (torch.full_like(largest, 127) / largest)
    row_scale = (largest / torch.full_like(largest, 127)).cuda()
    sums = steps.round().double().cuda() @ values.double().t()
    want = (sums.float() * (row_scale * scale)).to(dtype)
    assert torch.equal(linear(x.cuda(), weight), want)
    bias = random(n, dtype=dtype)
    added = (sums * (row_scale * scale).double() + bias.cuda().double()).to(dtype)
    torch.testing.assert_close(linear(x.cuda(), weight, bias), added, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", ["fp8", "blocks"])
@pytest.mark.parametrize("m", [9, 31, 64, 100, 129, 193, 256, 400, 700, 2100])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_fp8_tiles(n: int, k: int, m: int, kind: str) -> None:
    """Tiles, their tails, and those that several CTAs share."""
    dtype = DTYPES[(m + n) % 3]
    weight, x, bias = random_w8(n, k, kind), random(m, k, dtype=dtype), random(n, dtype=dtype)
    check(linear(x.cuda(), weight, bias), x, weight, bias)


@pytest.mark.parametrize("kind", ["fp8", "blocks"])
@pytest.mark.parametrize("m", [9, 20, 40, 100, 128])
def test_long_fp8_sums_are_promoted(m: int, kind: str) -> None:
    """Tensor cores keep some 14 bits of a sum and drop the others: at K = 16384 a hundredth of it, at 128 a thousandth."""
    n, k = 256, 16384
    values, scale = random_w8(n, k, kind)
    weight, x = (values.float().abs().to(E4M3), torch.full_like(scale, 0.01)), torch.rand(m, k) + 1
    rows = round_rows(x, E4M3, k if kind == "fp8" else SCALE_BLOCK).cuda()
    want = rows @ dequantize_w8(weight[0], weight[1], torch.float64).cuda().t()
    torch.testing.assert_close(linear(x.cuda(), weight).double(), want, rtol=2.0**-9, atol=0)


@pytest.mark.parametrize("m", [1, 3, 8])
@pytest.mark.parametrize("kind", ["fp8", "blocks"])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_few_rows_in_fp8_keep_small_values(dtype: torch.dtype, kind: str, m: int) -> None:
    """Beside large ones, whose weights are 0: errors of x are at most 2^-25 of the largest."""
    n, k = 48, 1040
    x = random(m, k, dtype=dtype) * torch.logspace(-6, 3, k).to(dtype)
    values = (torch.arange(n * k).reshape(n, k) % 3 - 1.0).to(E4M3)
    values[:, k // 2 :] = 0
    scale = torch.ones(n) if kind == "fp8" else torch.ones(1, 12)
    got = linear(x.cuda(), (values, scale)).double().cpu()
    rows, weights = x.double(), values.double()
    want, size = rows @ weights.t(), rows.abs() @ weights.abs().t()
    lost = rows.abs().amax(-1, keepdim=True) * 2.0**-25 * weights.abs().sum(1)
    assert torch.all((got - want).abs() <= want.abs() * ROUNDING[dtype] + size * SUMS[E4M3] + lost + 2.0**-24)


OTHERS = dict(os.environ, UNTORCH_W8A8_SPLIT_M="0", UNTORCH_W8A8_FP8_M="0")


@pytest.mark.skipif("UNTORCH_W8A8_SPLIT_M" in os.environ, reason="this is the process with the variable")
def test_what_other_gpus_run() -> None:
    """The GEMV, and cuBLASLt's FP8 for few rows: not on sm_90, unless the environment says otherwise."""
    tests = ["every_m", "sizes", "every_value", "few_rows", "same_bits", "in_a_graph", "not_aligned", "not_finite"]
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-o", "filterwarnings=ignore", __file__,
        "-k", " or ".join(tests),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=OTHERS, capture_output=True, text=True, check=False, cwd=pathlib.Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stdout[-4000:]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_w8a8_linear(data: st.DataObject) -> None:
    draw = data.draw
    kind, dtype, seed = draw(st.sampled_from(KINDS)), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))
    n, k = 16 * draw(st.integers(1, 40)), 16 * draw(st.integers(1, 140))
    weight = random_w8(n, k, kind, seed)
    width = k if draw(st.booleans()) else draw(st.integers(1, k))
    rows = st.integers(1, 20) | st.sampled_from([33, 100, 257])
    x = drawn_rows(draw, lambda *shape: random(*shape, dtype=dtype, seed=seed).cuda(), draw(rows), width)
    bias = draw(st.sampled_from([None, random(n, dtype=dtype, seed=seed), random(2 * n, dtype=dtype, seed=seed)[::2]]))
    check(linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_value(kind: str, dtype: torch.dtype) -> None:
    """All bytes, each at every place of 16: rows of the identity are not changed by rounding."""
    bytes_ = torch.arange(256, dtype=torch.uint8)
    values = torch.stack([bytes_.roll(-i) for i in range(16)]).view(I8)
    if kind != "int8":
        values = values.masked_fill((values & 127) == 127, 5).view(E4M3)
    scale = torch.ones(16) if kind != "blocks" else torch.ones(1, 4)
    for m in (8, 256):
        eye = torch.eye(256, dtype=dtype)[:m]
        got = linear(eye.cuda(), (values, scale)).float().cpu()
        torch.testing.assert_close(got.t(), values.float()[:, :m], rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_zero_or_not_finite(dtype: torch.dtype, kind: str) -> None:
    weight, x = random_w8(64, 512, kind), random(40, 512, dtype=dtype)
    x[3], x[4] = 0, -0.0
    x[8, 5], x[9, 300], x[10, 511] = float("inf"), float("-inf"), float("nan")
    got = linear(x.cuda(), weight)
    assert got[8:11].isnan().all() or not rounds(x, weight)
    assert not got[3:5].any()
    good = [i for i in range(40) if i not in (8, 9, 10)]
    check(got[good], x[good], weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_few_rows_that_are_zero_or_not_finite(dtype: torch.dtype, kind: str) -> None:
    weight, x = random_w8(64, 1040, kind), random(5, 1040, dtype=dtype)
    x[1] = 0
    x[2, 5], x[3, 1039], x[4, 600] = float("inf"), float("-inf"), float("nan")
    got = linear(x.cuda(), weight)
    assert got[2:].isnan().all()
    assert not got[1].any()
    check(got[:1], x[:1], weight)


@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_not_aligned(kind: str, m: int) -> None:
    weight = random_w8(64, 256, kind)
    moved = torch.empty(weight[0].numel() + 1, dtype=I8, device="cuda")[1:].view(64, 256)
    moved.copy_(weight[0].view(I8))
    for x in (random(m, 257, dtype=BF16).cuda()[:, 1:], random(m + 1, 251, dtype=BF16).cuda()[1:, :243]):
        got = call(LINEAR, x, moved.view(weight[0].dtype), weight[1].cuda(), Opt(None), returns=1)
        check(got, x, weight)


def test_no_rows_and_no_columns() -> None:
    weight, bias = random_w8(16, 128, "int8"), random(16, dtype=BF16)
    assert linear(torch.ones(0, 128, dtype=BF16).cuda(), weight).shape == (0, 16)
    empty = torch.empty(20, 0, dtype=BF16).cuda()
    assert torch.equal(linear(empty, weight, bias).cpu(), bias.expand(20, 16))


@pytest.mark.parametrize("m", [1, 8, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_every_time(kind: str, m: int) -> None:
    weight, x = random_w8(1024, 4096, kind), random(m, 4096, dtype=BF16).cuda()
    first = linear(x, weight)
    for _ in range(10):
        assert torch.equal(linear(x, weight), first)


@pytest.mark.parametrize("m", [1, 4, 600])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_graph(kind: str, m: int) -> None:
    """Captured on its first call, replayed with other values in the same place."""
    weight, out = random_w8(512, 2048, kind), torch.empty(m, 512, dtype=BF16, device="cuda")
    x = random(m, 2048, dtype=BF16).cuda()
    with captured(LINEAR, [x, weight[0].cuda(), weight[1].cuda()], (None,), out) as graph:
        for seed in (1, 2):
            x.copy_(random(m, 2048, dtype=BF16, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            check(out, x, weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [2, 50])
def test_eager_pytorch_calls_it(m: int, kind: str) -> None:
    from untorch.ops.w8a8 import OPERATOR

    weight, x, bias = random_w8(96, 320, kind), random(m, 300, dtype=BF16), random(96, dtype=BF16)
    operands = [tensor.cuda() for tensor in (x, *weight, bias)]
    got = OPERATOR(*operands)
    check(got, x, weight, bias)
    assert torch.equal(got, linear(x.cuda(), weight, bias))
