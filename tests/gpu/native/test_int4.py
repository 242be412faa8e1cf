"""Int4 W4A16 GEMM on the GPU, against float64 on the CPU and against PyTorch's own operator."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.again import run_again
from tests.gpu.native.captured import captured
from tests.native.int4_weights import Int4Weight, random_weight
from tests.native.operands import drawn_rows, rounded_once
from tests.native.shim import Opt, ShimError, call, use_torch_stream

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
GROUPS, TILES = [32, 64, 128, 256], [2, 4, 8]
ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
LINEAR, PACK = "aoti_torch_cuda_int4_linear", "aoti_torch_cuda__weight_int4pack_mm"


def linear(x: torch.Tensor, w: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    added = None if bias is None else bias.cuda()
    got: torch.Tensor = call(LINEAR, x, w.packed.cuda(), w.scales.cuda(), w.group, Opt(added), returns=1)
    return got


def check(got: torch.Tensor, x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Each row is of exact weights, or of weights that were rounded once to x's dtype: kernels do either."""
    assert got.shape == (*x.shape[:-1], dense.shape[0])
    assert got.dtype == x.dtype
    assert got.is_contiguous()
    added = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double().cpu()
    x64 = x.double().cuda()  # float64 GEMMs are exact enough anywhere
    least = torch.finfo(x.dtype).smallest_normal * ROUNDING[x.dtype]
    right = torch.zeros(got.shape[:-1], dtype=torch.bool, device="cuda")
    for weights in (dense.cuda(), rounded_once(dense, x.dtype).cuda()):
        want = x64 @ weights.t() + added.cuda()
        size = x64.abs() @ weights.abs().t() + added.cuda().abs()
        bound = want.abs() * ROUNDING[x.dtype] + size * 2.0**-17 + least
        right |= ((got.double() - want).abs() <= bound).all(-1)
    assert torch.all(right)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8, 9, 15, 16, 17, 31, 33, 63, 65, 127, 129, 200, 257, 700, 1024, 4099, 8192])
def test_every_m(m: int) -> None:
    for dtype, n, k, group in [(BF16, 1024, 1024, 128), (F16, 264, 2304, 32)]:
        w, x, bias = random_weight(n, k, group, 8, dtype), random(m, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias), x, w.dense, bias)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [1, 7, 24, 50, 100, 130, 300])
def test_groups_and_tiles(m: int, group: int, tiles: int) -> None:
    w, x = random_weight(392, 1280, group, tiles), random(m, 1280, dtype=BF16)
    check(linear(x.cuda(), w), x, w.dense)


@pytest.mark.parametrize(
    ("n", "k", "group"),
    [
        (8, 32, 32),
        (16, 96, 32),
        (4096, 4096, 128),
        (14336, 2048, 64),
        (14336, 256, 256),
        (8, 14336, 128),
        (120, 8192, 32),
    ],
)
@pytest.mark.parametrize("m", [1, 4, 6, 12, 40, 128, 260])
def test_sizes(m: int, n: int, k: int, group: int) -> None:
    w = random_weight(n, k, group, 8 if k % 128 == 0 else 2)
    x = random(m, k, dtype=BF16)
    check(linear(x.cuda(), w), x, w.dense)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_int4_linear(data: st.DataObject) -> None:
    draw = data.draw
    group, tiles = draw(st.sampled_from(GROUPS)), draw(st.sampled_from(TILES))
    step = max(group, 16 * tiles)
    n, k = 8 * draw(st.integers(1, 70)), step * draw(st.integers(1, 2048 // step))
    dtype = draw(st.sampled_from([BF16, F16, F32]))
    w = random_weight(n, k, group, tiles, dtype, draw(st.integers(0, 99)))
    width = k if draw(st.booleans()) else draw(st.integers(0, k))
    m = draw(st.integers(0, 10) | st.integers(0, 300) | st.sampled_from([513, 1500]))
    seed = draw(st.integers(0, 99))
    x = drawn_rows(draw, lambda *shape: random(*shape, dtype=dtype, seed=seed).cuda(), m, width)
    bias = draw(st.sampled_from([None, random(n, dtype=dtype, seed=seed), random(2 * n, dtype=dtype, seed=seed)[::2]]))
    check(linear(x, w, bias), x, w.dense[:, :width], bias)


@pytest.mark.parametrize("m", [1, 20, 300])
@pytest.mark.parametrize("scales", [F32, F16, BF16])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_scales_of_another_dtype(dtype: torch.dtype, scales: torch.dtype, m: int) -> None:
    """They are rounded to that of x."""
    w, x = random_weight(128, 512, 64, 8, scales), random(m, 512, dtype=dtype)
    converted = w.scales.to(dtype).double().repeat_interleave(64, dim=0)
    original = w.scales.double().repeat_interleave(64, dim=0)
    values = torch.round((w.dense - original[:, :, 1].t()) / original[:, :, 0].t())
    dense = values * converted[:, :, 0].t() + converted[:, :, 1].t()
    check(linear(x.cuda(), w), x, dense)


@pytest.mark.parametrize("m", [1, 8, 20, 100, 300])
def test_memory_that_is_not_aligned(m: int) -> None:
    w = random_weight(64, 256, 32)
    words = torch.empty(w.packed.numel() + 1, dtype=torch.int32, device="cuda")[1:].view(w.packed.shape)
    scales = torch.empty(w.scales.numel() + 1, dtype=BF16, device="cuda")[1:].view(w.scales.shape)
    x = random(m, 257, dtype=BF16).cuda()[:, 1:]
    got = call(LINEAR, x, words.copy_(w.packed), scales.copy_(w.scales), 32, Opt(None), returns=1)
    check(got, x, w.dense)


@pytest.mark.parametrize("m", [3, 20, 300])
def test_rows_that_overlap(m: int) -> None:
    w = random_weight(64, 256, 32)
    x = random(8 * m + 256, dtype=BF16).cuda().as_strided((m, 256), (8, 1))
    check(linear(x, w), x, w.dense)


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("m", [0, 1, 4, 30, 129, 1000])
def test_weight_int4pack_mm(m: int, group: int, tiles: int) -> None:
    """Also against PyTorch, which packs as we do and always rounds the weights."""
    w, x = random_weight(512, 1024, group, tiles), random(m, 1024, dtype=BF16).cuda()
    got = call(PACK, x, w.packed.cuda(), group, w.scales.cuda(), returns=1)
    check(got, x, w.dense)
    if m == 0:
        return
    scales = w.scales.double().repeat_interleave(group, dim=0)
    values = torch.round((w.dense - scales[:, :, 1].t()) / scales[:, :, 0].t() + 8).to(torch.uint8)
    bytes_of_two = (values[:, ::2] << 4 | values[:, 1::2]).contiguous().cuda()
    packed = torch.ops.aten._convert_weight_to_int4pack(bytes_of_two, tiles)
    assert torch.equal(packed.cpu(), w.packed)
    theirs = torch.ops.aten._weight_int4pack_mm(x, packed, group, w.scales.cuda())
    torch.testing.assert_close(got, theirs, rtol=2e-2, atol=2e-2 * 32)


@pytest.mark.parametrize("m", [1, 3, 8, 16, 40, 64, 128, 200, 300, 1024])
def test_the_same_bits_every_time(m: int) -> None:
    w, x = random_weight(1024, 4096, 128), random(m, 4096, dtype=BF16).cuda()
    packed, scales = w.packed.cuda(), w.scales.cuda()
    first = call(PACK, x, packed, 128, scales, returns=1)
    for _ in range(20):
        assert torch.equal(call(PACK, x, packed, 128, scales, returns=1), first)


@pytest.mark.parametrize("m", [1, 8, 16, 40, 100, 300])
def test_in_a_graph(m: int) -> None:
    """Captured on its first call, replayed with other values in the same place, on another stream too."""
    w, x = random_weight(512, 2048, 128), random(m, 2048, dtype=BF16).cuda()
    out = torch.empty(m, 512, dtype=BF16, device="cuda")
    rest = ctypes.c_int64(128), None
    with captured("aoti_torch_cuda_int4_linear", [x, w.packed.cuda(), w.scales.cuda()], rest, out) as graph:
        for seed in (1, 2):
            x.copy_(random(m, 2048, dtype=BF16, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            check(out, x, w.dense)


@pytest.mark.parametrize("m", [1, 30, 300])
def test_on_streams_side_by_side(m: int) -> None:
    w = random_weight(1024, 2048, 128)
    packed, scales = w.packed.cuda(), w.scales.cuda()
    inputs = [random(m, 2048, dtype=BF16, seed=i).cuda() for i in range(4)]
    want = [call(PACK, x, packed, 128, scales, returns=1) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    got: list[torch.Tensor] = []
    for stream, x in zip(streams, inputs, strict=True):
        with torch.cuda.stream(stream):
            use_torch_stream()
            for _ in range(5):
                result = call(PACK, x, packed, 128, scales, returns=1)
            got.append(result)
    use_torch_stream()
    torch.cuda.synchronize()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("gemv", "sm90", "sm80"), [(0, 100000, 0), (0, 0, 100000), (8, 0, 100000), (0, 0, 0)])
def test_other_kernels(gemv: int, sm90: int, sm80: int) -> None:
    """The same tests with the algorithms of other GPUs, or of other M."""
    selected = "not other_kernels and not weight_int4pack_mm and not refusals"
    run_again(__file__, selected, INT4_GEMV_M=gemv, INT4_SM80_M=sm80, INT4_SM90_M=sm90)


@pytest.mark.parametrize("tile_m", [8, 16, 32, 64, 128, 192, 224, 256])
def test_other_kernels_tiles(tile_m: int) -> None:
    selected = "every_m or the_same_bits"
    run_again(__file__, selected, INT4_GEMV_M=0, INT4_SM90_M=100000, INT4_TILE_M=tile_m)


def test_refusals_launch_nothing() -> None:
    w, x = random_weight(64, 256, 32), random(3, 256, dtype=BF16).cuda()
    packed, scales = w.packed.cuda(), w.scales.cuda()
    for args, expected in [
        ((x[:, ::2], packed, scales, 32, Opt(None)), "argument 'x' must have a contiguous last dimension"),
        ((x.cpu(), packed, scales, 32, Opt(None)), "argument 'x' is on cpu, expected cuda"),
        ((x, packed, scales[:4], 32, Opt(None)), "argument 'scale_and_zero' must have shape"),
    ]:
        with pytest.raises(ShimError, match=expected):
            call(LINEAR, *args, returns=1)
    check(linear(x, w), x, w.dense)
