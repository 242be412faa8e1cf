"""NVFP4 linear layers with ``prefill="fp4"``: a W4A4 GEMM at large M, by cuBLASLt, and emulated on other GPUs."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu.native.again import run_again
from tests.gpu.native.nvfp4_operands import (
    Weight,
    drawn_gemm,
    linear,
    random,
    replayed,
    special_rows,
    weight,
)
from tests.native.nvfp4_float4 import most_apart, rounded_rows
from tests.native.nvfp4_weights import BF16, E4M3, F16, F32
from tests.native.shim import ShimError
from untorch.ops.nvfp4_layout import dequantize_nvfp4, pack_nvfp4, pack_nvfp4_tiles

ROUNDING = {F32: 2.0**-22, BF16: 2.0**-8, F16: 2.0**-10}  # of a result
SUMS = 2.0**-12  # of sums, by their size
LIMIT = int(os.environ.get("UNTORCH_NVFP4_FP4_M", "256"))  # largest M that is exact
EMULATED = os.environ.get("UNTORCH_NVFP4_FP4_EMULATED") == "1"
GPU = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
MULTIPLIES = GPU in {(10, 0), (10, 3), (12, 0), (12, 1)}

multiplies = pytest.mark.skipif(not MULTIPLIES and not EMULATED, reason="test_emulated runs it on this GPU")


def check(got: torch.Tensor, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> None:
    """Sums of exactly the rounded values; and no further from the exact ones than what rounding explains."""
    assert (got.shape, got.dtype, got.is_contiguous()) == ((*x.shape[:-1], w.dense.shape[0]), x.dtype, True)
    k = x.shape[-1]
    rows, dense = x.reshape(-1, k).cpu(), w.dense[:, :k]
    added = torch.zeros(1, dtype=torch.float64) if bias is None else bias.double()
    left, result = rounded_rows(rows), got.reshape(len(rows), -1).double().cpu()
    want, size = left @ dense.t() + added, left.abs() @ dense.abs().t() + added.abs()
    least = torch.finfo(x.dtype).smallest_normal
    rounding = want.abs() * ROUNDING[x.dtype] + size * SUMS + least * ROUNDING[x.dtype]
    assert not result.isnan().any()
    assert bool(torch.all((result - want).abs() <= rounding))
    exact = rows.double() @ dense.t() + added
    assert bool(torch.all((result - exact).abs() <= most_apart(rows.double(), dense) + rounding))


@pytest.mark.skipif(MULTIPLIES, reason="this GPU multiplies them")
@pytest.mark.parametrize("m", [1, 300])
def test_other_gpus_refuse_any_m(m: int) -> None:
    if EMULATED:
        pytest.skip("emulated")
    w, x = weight(16, 128), random(m, 128, dtype=BF16).cuda()
    instead = "'fp8' or 'exact'" if GPU >= (8, 9) else "'exact'"
    with pytest.raises(ShimError) as error:
        linear(x, w, None, "fp4")
    assert str(error.value) == (
        "nvfp4_linear: prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): "
        f"quantise with prefill={instead}; cuda:0, {torch.cuda.get_device_name()}, is sm_{GPU[0]}{GPU[1]}"
    )


@pytest.mark.parametrize("limit", [0, 256])
def test_emulated(limit: int) -> None:
    """All of this file, with a kernel of our own in the place of cuBLASLt's."""
    if EMULATED:
        pytest.skip("it is this run")
    run_again(__file__, "not emulated and not refuse", NVFP4_FP4_EMULATED=1, NVFP4_FP4_M=limit)


@multiplies
@pytest.mark.parametrize("tiles", [0, 2, 4, 8])
@pytest.mark.parametrize("m", [1, 5, 33, 128, 256, 257, 600])
def test_rows_and_layouts(m: int, tiles: int) -> None:
    for dtype, world in ((BF16, None), (F16, torch.tensor(0.07)), (F32, torch.tensor([3.0]))):
        w, x, bias = weight(392, 1280, tiles, world), random(m, 1280, dtype=dtype), random(392, dtype=dtype)
        got, exact = linear(x.cuda(), w, bias, "fp4"), linear(x.cuda(), w, bias)
        if m > LIMIT:
            assert not torch.equal(got, exact)
            check(got, x, w, bias)
        else:
            assert torch.equal(got, exact)


@multiplies
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 48), (33, 1040), (1000, 4096), (5000, 528)])
def test_bytes_of_any_size(n: int, k: int) -> None:
    for dtype in (BF16, F32):
        w, x, bias = weight(n, k, 0), random(300, k, dtype=dtype), random(n, dtype=dtype)
        check(linear(x.cuda(), w, bias, "fp4"), x, w, bias)


@multiplies
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nvfp4_linear(data: st.DataObject) -> None:
    x, w, bias = drawn_gemm(data.draw, 40, 512, 1, st.integers(257, 300) | st.just(513))
    got = linear(x, w, bias, "fp4")
    if x.shape[:-1].numel() > LIMIT:
        check(got, x, w, bias)
    else:
        assert torch.equal(got, linear(x, w, bias))


@multiplies
@pytest.mark.parametrize("tiles", [0, 2, 8])
def test_every_value(tiles: int) -> None:
    """All codes with all scales, negative ones too; rows of the identity are exact."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[scales & 127 != 127].view(E4M3).reshape(-1, 1)
    n = scales.shape[0] - scales.shape[0] % 8
    eye = torch.eye(128, dtype=F32).repeat(3, 1).cuda()
    for part in (scales[:n], scales[-8:]):
        packed = pack_nvfp4(torch.arange(16).repeat(part.shape[0], 8))
        by = part.expand(part.shape[0], 8).contiguous()
        want = dequantize_nvfp4(packed, by, torch.tensor(0.25))
        w = Weight(pack_nvfp4_tiles(packed, tiles) if tiles else packed, by, torch.tensor(0.25), want.double())
        for rows in linear(eye, w, None, "fp4").cpu().split(128):
            torch.testing.assert_close(rows.t(), want, rtol=2.0**-20, atol=0)


@multiplies
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_rows_that_are_zero_tiny_large_or_not_finite(dtype: torch.dtype) -> None:
    w, (x, good) = weight(64, 512), special_rows(300, 512, dtype)
    got = linear(x.cuda(), w, None, "fp4")
    assert got[8:11].isnan().all()
    check(got[good], x[good], w)
    assert not got[3:5].any()


@multiplies
def test_no_rows_and_no_columns() -> None:
    w, bias = weight(16, 128), random(16, dtype=BF16)
    assert linear(torch.ones(0, 128, dtype=BF16).cuda(), w, None, "fp4").shape == (0, 16)
    empty = torch.empty(300, 0, dtype=BF16).cuda()
    assert torch.equal(linear(empty, w, bias, "fp4").cpu(), bias.expand(300, 16))


@multiplies
def test_in_a_graph() -> None:
    """Captured on its first call, replayed with other values in the same place."""
    w, out = weight(520, 1024), torch.empty(300, 520, dtype=BF16, device="cuda")
    for x in replayed(random(300, 1024, dtype=BF16), w, "fp4", out):
        check(out, x, w)
