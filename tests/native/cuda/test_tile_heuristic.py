"""How products of packed weights are shared out on an H200, compiled from its header. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cstdio>
#include "kernels/cuda/w4a16/tile_heuristic.h"
using namespace untorch::kernels::cuda;
void print(long m, long k, long n, int num_sms, int tile_rows) {
  W4A16Gemm p;
  p.m = m, p.k = k, p.n = n, p.num_sms = num_sms, p.tile_m = tile_rows;
  const StreamKPlan plan = choose_stream_k_plan(p, m);
  std::printf("%d %d %d %d %d %ld\n", plan.tile_m, plan.tiles_m, plan.tiles_n, plan.k_blocks, plan.ctas,
              long(plan.partial_floats()));
}
int main() {
  $CASES
}
"""
COLUMNS = {8: 256, 16: 256, 32: 256, 64: 256, 128: 192, 192: 128, 224: 128, 256: 128}


def plans(folder: Path, *cases: tuple[int, ...]) -> list[list[int]]:
    """For (m, k, n[, num_sms[, rows]]) each: rows of a tile, row tiles, column tiles, depth, blocks, partials."""
    calls = "\n  ".join(f"print({', '.join(map(str, (*case, *(132, 0)[len(case) - 3 :])))});" for case in cases)
    return [[int(number) for number in line.split()] for line in lines_of(SOURCE.replace("$CASES", calls), folder)]


def test_tiles_fit_the_rows(tmp_path: Path) -> None:
    """Large weights: tiles with few rows that are not there; small ones: enough tiles for all num_sms."""
    rows = [1, 8, 9, 16, 17, 33, 65, 129, 193, 225, 385, 388, 449, 768, 1024]
    large = plans(tmp_path, *((m, 8192, 28672) for m in rows))
    assert [plan[0] for plan in large] == [8, 8, 16, 16, 32, 64, 128, 192, 224, 256, 224, 224, 256, 256, 256]
    small = plans(tmp_path, *((m, 4096, 4096) for m in rows))
    assert [plan[0] for plan in small] == [8, 8, 16, 16, 16, 32, 32, 64, 128, 128, 224, 224, 128, 192, 256]


@pytest.mark.parametrize("num_sms", [1, 2, 78, 132])
def test_tiles_cover_the_product(num_sms: int, tmp_path: Path) -> None:
    cases = [(m, k, n) for m in (1, 20, 300, 1024) for k in (128, 384, 8192) for n in (8, 264, 4096)]
    found = plans(tmp_path, *((*case, num_sms) for case in cases))
    for (m, k, n), (rows, row_tiles, column_tiles, depth, blocks, partials) in zip(cases, found, strict=True):
        assert (row_tiles - 1) * rows < m <= row_tiles * rows
        assert (column_tiles - 1) * COLUMNS[rows] < n <= column_tiles * COLUMNS[rows]
        assert depth == k // 128
        assert 1 <= blocks <= min(num_sms, row_tiles * column_tiles * depth)
        assert partials == blocks * rows * COLUMNS[rows]


def test_whole_tiles_where_that_is_faster(tmp_path: Path) -> None:
    """2 × 64 tiles of 256 rows: 128 thread blocks have one each, and nobody adds sums of others."""
    assert plans(tmp_path, (512, 3072, 8192), (512, 3072, 8448)) == [
        [256, 2, 64, 24, 128, 128 * 256 * 128],
        [256, 2, 66, 24, 132, 132 * 256 * 128],
    ]


def test_tiles_that_are_asked_for(tmp_path: Path) -> None:
    found = plans(tmp_path, *((300, 1024, 1024, 132, rows) for rows in (*COLUMNS, 100)))
    assert [plan[0] for plan in found[:-1]] == list(COLUMNS)
    assert found[-1] == plans(tmp_path, (300, 1024, 1024))[0]  # there are none of 100 rows
