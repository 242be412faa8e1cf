"""Products with NVFP4 weights in float8, which ``prefill="fp8"`` asks for: many rows on the GPU."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.again import run_again
from tests.gpu.native.nvfp4_operands import LINEAR, Weight, linear, random, weight
from tests.native.nvfp4_float8 import most_apart, rows_in_float8, weight_in_float8
from tests.native.nvfp4_weights import BF16, E4M3, F16, F32
from tests.native.operands import drawn_rows
from tests.native.shim import Opt, call, delete, handle, lib, raise_on, use_torch_stream
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
SUMS = 2.0**-10  # of sums in tensor cores, by their size; those with fast accumulation too
LIMIT = int(os.environ.get("UNTORCH_NVFP4_FP8_ROWS", "512"))  # rows that are exact

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8 products"
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
def test_every_number_of_rows(m: int) -> None:
    for dtype, n, k in [(BF16, 1024, 1024), (F16, 272, 2304), (F32, 128, 256)]:
        w, x, bias = weight(n, k), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias, "fp8"), x, w, bias)


@pytest.mark.parametrize("tiles", [0, 8])
@pytest.mark.parametrize("m", [1, 2, 5, 16, 33, 128, 512])
def test_few_rows(m: int, tiles: int) -> None:
    """Exact up to the limit, which test_any_number_of_rows moves."""
    w, x, bias = weight(264, 512, tiles), random(m, 512, dtype=BF16), random(264, dtype=BF16)
    got, exact = linear(x.cuda(), w, bias, "fp8"), linear(x.cuda(), w, bias)
    if m > LIMIT:
        assert not torch.equal(got, exact)
        check(got, x, w, bias)
    else:
        assert torch.equal(got, exact)


@pytest.mark.parametrize("fast", [0, 1])
def test_any_number_of_rows(fast: int) -> None:
    run_again(
        __file__, "few_rows or every_number_of_rows or nvfp4_linear", NVFP4_FP8_ROWS=0, NVFP4_FP8_FAST_ACCUMULATION=fast
    )


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


def test_more_rows_than_there_is_room_for_sums_of() -> None:
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
    draw = data.draw
    tiles = draw(st.sampled_from([0, 2, 4, 8, 8]))
    step = 16 * max(tiles, 1)
    n, k = 8 * draw(st.integers(1, 70)), step * draw(st.integers(1, 1024 // step))
    if tiles == 0:
        n -= draw(st.integers(0, 7))
    seed = draw(st.integers(0, 99))
    w = weight(n, k, tiles, draw(st.sampled_from([None, torch.tensor(0.03), torch.tensor([2.5])])), seed)
    dtype = draw(st.sampled_from([BF16, F16, F32]))
    width = k if draw(st.booleans()) else draw(st.integers(1, k))
    m = draw(st.integers(513, 560) | st.sampled_from([1029, 1500]))
    x = drawn_rows(draw, lambda *shape: random(*shape, dtype=dtype, seed=seed).cuda(), m, width)
    bias = draw(st.sampled_from([None, random(n, dtype=dtype, seed=seed), random(2 * n, dtype=dtype, seed=seed)[::2]]))
    got = linear(x, w, bias, "fp8")
    if x.numel() // width > LIMIT:
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
    eye = torch.eye(128, dtype=dtype).repeat(3, 1).cuda()
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
    w, x = weight(n, 512), random(600, 512, dtype=dtype)
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    x[3] = 0
    x[4] = -0.0
    x[5] = x[5].sign() * least * 32  # in bfloat16 and float32 less than a scale can be for
    x[6] = x[6] * (largest / 1e4 / x[6].abs().max())
    x[7] = 0
    x[7, 100] = 1
    bad = {8: float("inf"), 9: float("-inf"), 10: float("nan")}
    for row, value in bad.items():
        x[row, 37 * row] = value
    got = linear(x.cuda(), w, None, "fp8")
    assert got[8:11].isnan().all()
    good = [row for row in range(600) if row not in bad]
    check(got[good], x[good], w)
    assert not got[3:5].any()


def test_memory_that_is_not_aligned() -> None:
    for tiles in (0, 8):
        w = weight(64, 256, tiles)
        words = torch.empty(w.packed.numel() + 1, dtype=w.packed.dtype, device="cuda")[1:].view(w.packed.shape)
        scales = torch.empty(w.scales.numel() + 1, dtype=torch.uint8, device="cuda")[1:].view(w.scales.shape)
        scales = scales.copy_(w.scales.view(torch.uint8)).view(E4M3)
        for x in (random(600, 257, dtype=BF16).cuda()[:, 1:], random(601, 251, dtype=BF16).cuda()[1:, :243]):
            got = call(LINEAR, x, words.copy_(w.packed), scales, w.world.cuda(), Opt(None), "fp8", returns=1)
            check(got, x, w)


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
    m, w = 600, weight(n, 2048)
    x, out = random(m, 2048, dtype=BF16).cuda(), torch.empty(m, n, dtype=BF16, device="cuda")
    operands = [x, w.packed.cuda(), w.scales.cuda(), w.world.cuda(), out]
    handles = [handle(tensor) for tensor in operands]
    graph, made = torch.cuda.CUDAGraph(), ctypes.c_void_p()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        use_torch_stream()
        raise_on(getattr(lib, LINEAR)(*handles[:4], None, b"fp8", ctypes.byref(made)))
        raise_on(lib.aoti_torch_copy_(handles[4], made, ctypes.c_int32(0)))
    use_torch_stream()
    try:
        for seed in (1, 2):
            x.copy_(random(m, 2048, dtype=BF16, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            check(out, x, w)
    finally:
        for h in [*handles, made]:
            delete(h)
