"""Tiles and stream-K plans of the W4A16 sm_90 GEMM on an H200, compiled from its header. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cstdio>
#include "kernels/cuda/w4a16/tile_heuristic.h"
using namespace untorch::kernels::cuda;
void print(long m, long k, long n, int num_sms, int tile_m) {
  W4A16Gemm p;
  p.m = m, p.k = k, p.n = n, p.num_sms = num_sms, p.tile_m = tile_m;
  const StreamKPlan plan = choose_stream_k_plan(p, m);
  std::printf("%d %d %d %d %d %ld\n", plan.tile_m, plan.tiles_m, plan.tiles_n, plan.k_blocks, plan.ctas,
              long(plan.partial_floats()));
}
int main() {
  $CASES
}
"""
TILE_N = {8: 256, 16: 256, 32: 256, 64: 256, 128: 192, 192: 128, 224: 128, 256: 128}


def plans(folder: Path, *cases: tuple[int, ...]) -> list[list[int]]:
    """For (m, k, n[, num_sms[, tile_m]]) each: tile_m, tiles_m, tiles_n, k_blocks, ctas, partial_floats."""
    calls = "\n  ".join(f"print({', '.join(map(str, (*case, *(132, 0)[len(case) - 3 :])))});" for case in cases)
    return [[int(number) for number in line.split()] for line in lines_of(SOURCE.replace("$CASES", calls), folder)]


def test_tiles_fit_m(tmp_path: Path) -> None:
    """Large weights: tiles with little padding in M; small ones: enough tiles for all SMs."""
    values = [1, 8, 9, 16, 17, 33, 65, 129, 193, 225, 385, 388, 449, 768, 1024]
    large = plans(tmp_path, *((m, 8192, 28672) for m in values))
    assert [plan[0] for plan in large] == [8, 8, 16, 16, 32, 64, 128, 192, 224, 256, 224, 224, 256, 256, 256]
    small = plans(tmp_path, *((m, 4096, 4096) for m in values))
    assert [plan[0] for plan in small] == [8, 8, 16, 16, 16, 32, 32, 64, 128, 128, 224, 224, 128, 192, 256]


@pytest.mark.parametrize("num_sms", [1, 2, 78, 132])
def test_tiles_cover_the_problem(num_sms: int, tmp_path: Path) -> None:
    cases = [(m, k, n) for m in (1, 20, 300, 1024) for k in (128, 384, 8192) for n in (8, 264, 4096)]
    found = plans(tmp_path, *((*case, num_sms) for case in cases))
    for (m, k, n), (tile_m, tiles_m, tiles_n, k_blocks, ctas, partials) in zip(cases, found, strict=True):
        assert (tiles_m - 1) * tile_m < m <= tiles_m * tile_m
        assert (tiles_n - 1) * TILE_N[tile_m] < n <= tiles_n * TILE_N[tile_m]
        assert k_blocks == k // 128
        assert 1 <= ctas <= min(num_sms, tiles_m * tiles_n * k_blocks)
        assert partials == ctas * tile_m * TILE_N[tile_m]


def test_whole_tiles_where_that_is_faster(tmp_path: Path) -> None:
    """2 × 64 tiles with TileM 256: data-parallel, 128 CTAs have one each, without fix-up."""
    assert plans(tmp_path, (512, 3072, 8192), (512, 3072, 8448)) == [
        [256, 2, 64, 24, 128, 128 * 256 * 128],
        [256, 2, 66, 24, 132, 132 * 256 * 128],
    ]


def test_tiles_that_are_asked_for(tmp_path: Path) -> None:
    found = plans(tmp_path, *((300, 1024, 1024, 132, tile_m) for tile_m in (*TILE_N, 100)))
    assert [plan[0] for plan in found[:-1]] == list(TILE_N)
    assert found[-1] == plans(tmp_path, (300, 1024, 1024))[0]  # there is no TileM 100
