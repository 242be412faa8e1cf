"""NVFP4 linear layers with ``prefill="fp8"``: a W8A8 GEMM at large M, on the GPU."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.again import run_again
from tests.gpu.native.nvfp4_operands import (
    LINEAR,
    Weight,
    drawn_gemm,
    linear,
    not_aligned,
    random,
    replayed,
    special_rows,
    weight,
)
from tests.native.nvfp4_float8 import most_apart, rows_in_float8, weight_in_float8
from tests.native.nvfp4_weights import BF16, E4M3, F16, F32
from tests.native.shim import Opt, call
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
SUMS = 2.0**-10  # of sums in tensor cores, by their size; those with fast accumulation too
LIMIT = int(os.environ.get("UNTORCH_NVFP4_FP8_M", "512"))  # largest M that is exact

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 GEMMs"
)


def check(got: torch.Tensor, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> None:
    """Sums of exactly the rounded values; and no further from the exact ones than what rounding explains."""
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], w.dense.shape[0]), x.dtype, True)
    x, k = x.cpu(), x.shape[-1]
    (rows, of_rows), (columns, of_columns) = rows_in_float8(x), weight_in_float8(w.packed, w.scales, w.world)
    left, right = (rows.double() * of_rows).cuda(), (columns.double() * of_columns[:, None])[:, :k].cuda()
    added = torch.zeros(1, dtype=torch.float64).cuda() if bias is None else bias.double().cuda()
    want, size = left @ right.t() + added, left.abs() @ right.abs().t() + added.abs()
    rounding = want.abs() * ROUNDING[x.dtype] + size * SUMS + torch.finfo(x.dtype).smallest_normal * ROUNDING[x.dtype]
    assert not got.isnan().any()
    assert bool(torch.all((got.double() - want).abs() <= rounding))
    x64, dense = x.double().cuda(), w.dense[:, :k].cuda()
    apart = most_apart(x64, dense, of_rows.cuda(), of_columns.cuda())
    exact = x64 @ dense.t() + added
    assert bool(torch.all((got.double() - exact).abs() <= apart + rounding))


@pytest.mark.parametrize("m", [513, 600, 777, 1024, 4099])
def test_every_m(m: int) -> None:
    for dtype, n, k in [(BF16, 1024, 1024), (F16, 272, 2304), (F32, 128, 256)]:
        w, x, bias = weight(n, k), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias, "fp8"), x, w, bias)


@pytest.mark.parametrize("tiles", [0, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16, 33, 128, 512])
def test_small_m(m: int, tiles: int) -> None:
    """Exact up to the limit, which test_any_m moves."""
    w, x, bias = weight(264, 512, tiles), random(m, 512, dtype=BF16), random(264, dtype=BF16)
    got, exact = linear(x.cuda(), w, bias, "fp8"), linear(x.cuda(), w, bias)
    if m > LIMIT:
        assert not torch.equal(got, exact)
        check(got, x, w, bias)
    else:
        assert torch.equal(got, exact)


@pytest.mark.parametrize("fast", [0, 1])
def test_any_m(fast: int) -> None:
    run_again(__file__, "small_m or every_m or nvfp4_linear", NVFP4_FP8_M=0, NVFP4_FP8_FAST_ACCUMULATION=fast)


@pytest.mark.parametrize("tiles", [0, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_layouts(dtype: torch.dtype, tiles: int) -> None:
    for world in (None, torch.tensor(0.07), torch.tensor([3.0])):
        w, x = weight(400, 1280, tiles, world), random(600, 1280, dtype=dtype)
        check(linear(x.cuda(), w, None, "fp8"), x, w)


@pytest.mark.parametrize(("n", "k"), [(8, 128), (16, 256), (4096, 4096), (14336, 256), (8, 14336), (120, 8192)])
def test_sizes(n: int, k: int) -> None:
    w, x, bias = weight(n, k), random(600, k, dtype=BF16), random(n, dtype=BF16)
    check(linear(x.cuda(), w, bias, "fp8"), x, w, bias)


def test_chunks_of_accumulators() -> None:
    """float32, whose columns are multiplied 256 at a time."""
    w = weight(1032, 128)
    x = random(200_000, 128, dtype=F32)
    got = linear(x.cuda(), w, None, "fp8")
    for rows in (slice(0, 3), slice(-3, None)):
        check(got[rows].contiguous(), x[rows], w)


@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 48), (33, 1040), (1000, 4096), (5000, 528)])
def test_bytes_of_any_size(n: int, k: int) -> None:
    for dtype in (BF16, F16, F32):
        w, x, bias = weight(n, k, 0), random(600, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias, "fp8"), x, w, bias)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_nvfp4_linear(data: st.DataObject) -> None:
    x, w, bias = drawn_gemm(data.draw, 70, 1024, 1, st.integers(513, 560) | st.sampled_from([1029, 1500]))
    got = linear(x, w, bias, "fp8")
    if x.shape[:-1].numel() > LIMIT:
        check(got, x, w, bias)
    else:
        assert torch.equal(got, linear(x, w, bias))


@pytest.mark.parametrize("tiles", [0, 2, 8])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_value(dtype: torch.dtype, tiles: int) -> None:
    """All codes with all scales, rounded to E4M3: rows of the identity are 448 by 1 / 448."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[scales & 127 != 127].view(E4M3).reshape(-1, 1)
    n = scales.shape[0] - scales.shape[0] % 8
    eye = torch.eye(128, dtype=dtype).repeat(5, 1).cuda()
    for part in (scales[:n], scales[-8:]):
        packed = pack_nvfp4(torch.arange(16).repeat(part.shape[0], 8))
        by = part.expand(part.shape[0], 8).contiguous()
        want = (dequantize_nvfp4(packed, by, torch.tensor(1.0)) / 8).to(E4M3).float() * 2
        w = Weight(pack_nvfp4_tiles(packed, tiles) if tiles else packed, by, torch.tensor(0.25), want.double())
        got = linear(eye, w, None, "fp8").float().cpu()
        for rows in got.split(128):
            torch.testing.assert_close(rows.t(), want, rtol=2.0**-7 if dtype == BF16 else 2.0**-20, atol=0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("n", [64, 72])
def test_rows_that_are_zero_tiny_large_or_not_finite(dtype: torch.dtype, n: int) -> None:
    w, (x, good) = weight(n, 512), special_rows(600, 512, dtype)
    got = linear(x.cuda(), w, None, "fp8")
    assert got[8:11].isnan().all()
    check(got[good], x[good], w)
    assert not got[3:5].any()


def test_memory_that_is_not_aligned() -> None:
    for tiles in (0, 8):
        w = weight(64, 256, tiles)
        for x in (random(600, 257, dtype=BF16).cuda()[:, 1:], random(601, 251, dtype=BF16).cuda()[1:, :243]):
            check(call(LINEAR, x, *not_aligned(w), w.world.cuda(), Opt(None), "fp8", returns=1), x, w)


def test_no_rows_and_no_columns() -> None:
    w, bias = weight(16, 128), random(16, dtype=BF16)
    assert linear(torch.ones(0, 128, dtype=BF16).cuda(), w, None, "fp8").shape == (0, 16)
    empty = torch.empty(600, 0, dtype=BF16).cuda()
    assert torch.equal(linear(empty, w, bias, "fp8").cpu(), bias.expand(600, 16))


def test_the_same_bits_every_time() -> None:
    w, x = weight(1024, 4096), random(600, 4096, dtype=BF16).cuda()
    first = linear(x, w, None, "fp8")
    assert not torch.equal(first, linear(x, w))
    for _ in range(10):
        assert torch.equal(linear(x, w, None, "fp8"), first)


@pytest.mark.parametrize("n", [512, 520])
def test_in_a_graph(n: int) -> None:
    """Captured on its first call, replayed with other values in the same place."""
    w, out = weight(n, 2048), torch.empty(600, n, dtype=BF16, device="cuda")
    for x in replayed(random(600, 2048, dtype=BF16), w, "fp8", out):
        check(out, x, w)
