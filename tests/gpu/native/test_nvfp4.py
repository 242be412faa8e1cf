"""NVFP4 W4A16 GEMM on the GPU, against float64 of exact weights."""

from __future__ import annotations

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
    weight,
)
from tests.native.nvfp4_weights import BF16, E4M3, F16, F32
from tests.native.shim import Opt, ShimError, call, use_torch_stream
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
HALF_STEP = {BF16: 2.0**-8, F16: 2.0**-11}  # of a result that is rounded once
ROWS = [1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 200, 257, 512, 513, 1024, 1025, 4099]


def excess(got: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> float:
    """By how much the largest difference is more than rounding explains."""
    added = torch.zeros(1, dtype=torch.float64).cuda() if bias is None else bias.double().cuda()
    x64, dense = x.double().cuda(), dense[:, : x.shape[-1]].cuda()  # float64 GEMMs are exact enough anywhere
    want, size = x64 @ dense.t() + added, x64.abs() @ dense.abs().t() + added.abs()
    least = torch.finfo(got.dtype).smallest_normal * ROUNDING[x.dtype]
    over = (got.double() - want).abs() - (want.abs() * ROUNDING[x.dtype] + size * 2.0**-17 + least)
    assert not got.isnan().any()
    return float(over.max()) if over.numel() else 0.0


def check(got: torch.Tensor, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> None:
    """Of exact weights, or all of weights that were rounded to x's dtype."""
    assert got.shape == (*x.shape[:-1], w.dense.shape[0])
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    assert excess(got, x, w.dense, bias) <= 0 or excess(got, x, w.rounded(x.dtype), bias) <= 0


@pytest.mark.parametrize("m", ROWS)
def test_every_m(m: int) -> None:
    for dtype, n, k in [(BF16, 1024, 1024), (F16, 264, 2304)]:
        w, x, bias = weight(n, k), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias), x, w, bias)


@pytest.mark.parametrize("tiles", [0, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("m", [1, 7, 24, 50, 100, 130, 300, 700])
def test_layouts(m: int, dtype: torch.dtype, tiles: int) -> None:
    for world in (None, torch.tensor(0.07), torch.tensor([3.0])):
        w, x = weight(392, 1280, tiles, world), random(m, 1280, dtype=dtype)
        check(linear(x.cuda(), w), x, w)


@pytest.mark.parametrize(
    ("n", "k"), [(8, 128), (16, 256), (4096, 4096), (14336, 256), (8, 14336), (120, 8192), (2048, 768)]
)
@pytest.mark.parametrize("m", [1, 4, 6, 12, 40, 128, 260, 600])
def test_sizes(m: int, n: int, k: int) -> None:
    w, x = weight(n, k), random(m, k, dtype=BF16)
    check(linear(x.cuda(), w), x, w)


@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 48), (33, 1040), (1000, 4096), (5000, 528)])
@pytest.mark.parametrize("m", [1, 5, 64, 300])
def test_bytes_of_any_size(m: int, n: int, k: int) -> None:
    """No padding to tiles: n need not be a multiple of 8, nor k of 128."""
    for dtype in (BF16, F16, F32):
        w, x, bias = weight(n, k, 0), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias), x, w, bias)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_nvfp4_linear(data: st.DataObject) -> None:
    x, w, bias = drawn_gemm(
        data.draw, 70, 2048, 0, st.integers(0, 10) | st.integers(0, 300) | st.sampled_from([513, 1500])
    )
    check(linear(x, w, bias), x, w, bias)


@pytest.mark.parametrize(("gemv", "sm80", "sm90"), [(0, 100000, 0), (0, 0, 100000), (8, 100000, 0), (0, 0, 0)])
def test_other_kernels(gemv: int, sm80: int, sm90: int) -> None:
    """The same tests with the algorithms of other GPUs, or of other M."""
    selected = "every_m or sizes or every_value or the_same_bits or in_a_graph or side_by_side or not_aligned"
    if gemv or sm80 or sm90:  # dequantize + cuBLAS rounds weights
        selected += " or only_sums"
    run_again(__file__, selected, NVFP4_GEMV_M=gemv, NVFP4_SM80_M=sm80, NVFP4_SM90_M=sm90)


@pytest.mark.parametrize("tile_m", [8, 16, 32, 64, 128, 192, 224, 256])
def test_other_kernels_tiles(tile_m: int) -> None:
    selected = "every_m or the_same_bits"
    run_again(__file__, selected, NVFP4_GEMV_M=0, NVFP4_SM90_M=100000, NVFP4_TILE_M=tile_m)


@pytest.mark.parametrize("tiles", [0, 2, 8])
@pytest.mark.parametrize("m", [1, 8, 16, 128, 600])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_every_value(dtype: torch.dtype, m: int, tiles: int) -> None:
    """Exact: all codes with all scales, and a global scale that is a power of two."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[scales & 127 != 127].view(E4M3).reshape(-1, 1)
    n = scales.shape[0] - scales.shape[0] % 8
    for part in (scales[:n], scales[-8:]):
        codes = torch.arange(16).repeat(part.shape[0], 8)
        packed, by = pack_nvfp4(codes), part.expand(part.shape[0], 8).contiguous()
        want = dequantize_nvfp4(packed, by, torch.tensor(0.25), dtype)
        w = Weight(pack_nvfp4_tiles(packed, tiles) if tiles else packed, by, torch.tensor(0.25), want.double())
        eye = torch.eye(128, dtype=dtype).repeat(5, 1).cuda()
        got = torch.cat([linear(rows, w) for rows in eye[: max(m, 128)].split(m)])
        assert torch.equal(got[:128].cpu().t(), want)


@pytest.mark.parametrize("m", [1, 20])
def test_nan_among_the_scales_counts_as_480(m: int) -> None:
    codes = torch.full((8, 128), 2)
    scales = torch.full((8, 8), 127, dtype=torch.uint8).view(E4M3)
    w = Weight(pack_nvfp4_tiles(pack_nvfp4(codes)), scales, torch.tensor(1.0), torch.full((8, 128), 480.0).double())
    assert torch.equal(linear(torch.eye(128, dtype=BF16)[:m].cuda(), w).cpu(), torch.full((m, 8), 480.0).to(BF16))


@pytest.mark.parametrize("m", [1, 8, 9, 64, 256])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_only_sums_are_rounded(dtype: torch.dtype, m: int) -> None:
    """One term a result, of values that are exact: weights rounded to x's dtype would show.

    Small ones are dequantized for cuBLAS, and rounded, from M = 17 on.
    """
    w = weight(64 if m <= 16 else 65536, 256)
    x = (torch.eye(256)[:m] * (1 + 2.0**-7)).to(dtype)
    want = x.double() @ w.dense.t()
    got = linear(x.cuda(), w).cpu().double()
    assert torch.all((got - want).abs() <= want.abs() * HALF_STEP[dtype] * (1 + 2.0**-10) + 2.0**-25)


@pytest.mark.parametrize("m", [1, 8, 20, 100, 300, 600])
def test_memory_that_is_not_aligned(m: int) -> None:
    for tiles in (0, 8):
        w = weight(64, 256, tiles)
        x = random(m, 257, dtype=BF16).cuda()[:, 1:]
        check(call(LINEAR, x, *not_aligned(w), w.world.cuda(), Opt(None), "exact", returns=1), x, w)


def test_no_rows_and_no_columns() -> None:
    w, bias = weight(16, 128), random(16, dtype=BF16)
    assert linear(torch.ones(2, 0, 128, dtype=BF16).cuda(), w).shape == (2, 0, 16)
    none = Weight(w.packed[:0], w.scales[:0], w.world[:0], w.dense[:0])
    assert linear(torch.ones(3, 128, dtype=BF16).cuda(), none).shape == (3, 0)
    empty = torch.empty(3, 0, dtype=BF16).cuda()
    codes, scales = torch.empty(16, 0, dtype=torch.uint8), torch.empty(16, 0, dtype=E4M3)
    for narrow in (w, Weight(codes, scales, w.world, w.dense[:, :0])):
        assert torch.equal(linear(empty, narrow, bias).cpu(), bias.expand(3, 16))
        assert torch.equal(linear(empty, narrow).cpu(), torch.zeros(3, 16).to(BF16))


@pytest.mark.parametrize("m", [1, 3, 8, 16, 40, 64, 128, 200, 300, 1024])
def test_the_same_bits_every_time(m: int) -> None:
    w, x = weight(1024, 4096), random(m, 4096, dtype=BF16).cuda()
    packed, scales, world = w.packed.cuda(), w.scales.cuda(), w.world.cuda()
    first = call(LINEAR, x, packed, scales, world, Opt(None), "exact", returns=1)
    for _ in range(20):
        assert torch.equal(call(LINEAR, x, packed, scales, world, Opt(None), "exact", returns=1), first)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 100, 300, 600])
def test_in_a_graph(m: int) -> None:
    """Captured on its first call, replayed with other values in the same place, on another stream too."""
    w, out = weight(512, 2048), torch.empty(m, 512, dtype=BF16, device="cuda")
    for x in replayed(random(m, 2048, dtype=BF16), w, "exact", out):
        check(out, x, w)


@pytest.mark.parametrize("m", [1, 30, 300, 600])
def test_on_streams_side_by_side(m: int) -> None:
    w = weight(1024, 2048)
    rest = (w.packed.cuda(), w.scales.cuda(), w.world.cuda(), Opt(None), "exact")
    inputs = [random(m, 2048, dtype=BF16, seed=i).cuda() for i in range(4)]
    want = [call(LINEAR, x, *rest, returns=1) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[torch.Tensor] = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            use_torch_stream()
            for _ in range(5):
                result = call(LINEAR, x, *rest, returns=1)
            got.append(result)
    use_torch_stream()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_refusals_launch_nothing() -> None:
    w, x = weight(64, 256), random(3, 256, dtype=BF16).cuda()
    packed, scales, world = w.packed.cuda(), w.scales.cuda(), w.world.cuda()
    for args, expected in [
        ((x[:, ::2], packed, scales, world, Opt(None)), "argument 'x' must have a contiguous last dimension"),
        ((x.cpu(), packed, scales, world, Opt(None)), "argument 'x' is on cpu, expected cuda"),
        ((x, packed, scales[:4], world, Opt(None)), "argument 'block_scale' must have shape"),
        ((x, packed, scales, world[:3], Opt(None)), "argument 'global_scale' must be contiguous and have shape"),
    ]:
        with pytest.raises(ShimError, match=expected):
            call(LINEAR, *args, "exact", returns=1)
    check(linear(x, w), x, w)
