"""Tiles, schedule and dispatch of the sm_90 GEMM of 8-bit weights, compiled from its header. Needs no GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native.cuda.compiled import compiled

SOURCE = r"""
#include <cstdio>
#include "kernels/cuda/w8a8/gemm_plan.h"
using namespace untorch;
using namespace untorch::kernels::cuda;
int main() {
  long m, n, k, sms, is_fp8, has_wgmma;
  while (std::scanf("%ld %ld %ld %ld %ld %ld", &m, &n, &k, &sms, &is_fp8, &has_wgmma) == 6) {
    W8Gemm p;
    p.weight_dtype = is_fp8 ? DType::kFloat8E4M3FN : DType::kInt8;
    p.m = m, p.n = n, p.k = k, p.num_sms = int(sms), p.has_wgmma = has_wgmma;
    const W8GemmPlan plan = w8_gemm_plan(p);
    std::printf("%d %d %d %d %d %d %d %ld %d\n", plan.tile_m, plan.tile_n, plan.tiles_m, plan.tiles_n, plan.k_blocks,
                plan.ctas, plan.stream_k_tiles, long(w8_gemm_workspace(p)), has_w8_gemm_sm90(p));
  }
}
"""
SHAPES = [(16, 16), (144, 1040), (6144, 4096), (24576, 4096), (4096, 12288), (8192, 2048), (128, 14336)]  # n, k
ROWS = [1, 8, 9, 16, 17, 33, 64, 65, 100, 128, 129, 193, 256, 512, 2048, 8192]


class Plan(NamedTuple):
    tile_m: int
    tile_n: int
    tiles_m: int
    tiles_n: int
    k_blocks: int
    ctas: int
    stream_k_tiles: int
    workspace: int
    serves: int


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(SOURCE, tmp_path_factory.mktemp("plan"))


def plans(program: Path, cases: list[tuple[int, int, int, int, int, int]]) -> list[Plan]:
    """For M, N, K, SMs, whether the weight is E4M3 and whether there is WGMMA."""
    text = "\n".join(" ".join(map(str, case)) for case in cases)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [Plan(*map(int, line.split())) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("is_fp8", [0, 1])
@pytest.mark.parametrize("sms", [1, 78, 132])
def test_tiles_cover_the_result(program: Path, sms: int, is_fp8: int) -> None:
    cases = [(m, n, k, sms, is_fp8, 1) for m in ROWS for n, k in SHAPES]
    for (m, n, k, *_), plan in zip(cases, plans(program, cases), strict=True):
        assert plan.tiles_m == -(-m // plan.tile_m)
        assert plan.tiles_n == -(-n // plan.tile_n)
        assert plan.k_blocks == -(-k // 128)
        tiles = plan.tiles_m * plan.tiles_n
        assert 1 <= plan.ctas <= sms
        assert 0 <= plan.stream_k_tiles <= tiles
        # Stream-K's CTAs have at least one k block each; each writes its partial sums in a place of its own.
        if plan.stream_k_tiles == 0:
            assert plan.workspace == 0
            assert plan.ctas <= tiles
        else:
            assert plan.ctas <= plan.stream_k_tiles * plan.k_blocks
            assert plan.workspace == 8 * -(-sms // 16) * 16 + plan.ctas * max(plan.tile_m, 24) * plan.tile_n * 4


def test_tile_m(program: Path) -> None:
    """The smallest that takes all rows. E4M3, whose sums are in registers twice, has none above 128."""
    int8, fp8 = (plans(program, [(m, 6144, 4096, 132, is_fp8, 1) for m in ROWS]) for is_fp8 in (0, 1))
    assert [plan.tile_m for plan in int8[:10]] == [16, 16, 16, 16, 32, 64, 64, 128, 128, 128]
    assert [plan.tile_m for plan in fp8] == [16, 16, 16, 16, 32, 64, 64, *[128] * 9]
    assert max(plan.tile_m for plan in int8[10:]) == 256


def test_what_it_serves(program: Path) -> None:
    """Both dtypes and any M where there is WGMMA; elsewhere nothing."""
    cases = [(m, 4096, 4096, 132, is_fp8, has_wgmma) for has_wgmma in (1, 0) for is_fp8 in (0, 1) for m in (1, 9, 4096)]
    assert [plan.serves for plan in plans(program, cases)] == [1] * 6 + [0] * 6
