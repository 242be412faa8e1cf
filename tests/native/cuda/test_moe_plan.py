"""Tiles and workspace of NVFP4 and int4 MoE on CUDA, compiled from their headers. Needs no GPU."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from tests.native.cuda.compiled import compiled

SOURCE = r"""
#include <cstdio>
#include "kernels/cuda/moe/int4_moe.h"
#include "kernels/cuda/moe/nvfp4_moe.h"
using namespace untorch;
using namespace untorch::kernels::cuda;
template <class Moe>
void print(Moe p, long tokens, long experts, long top_k) {
  p.tokens = tokens, p.experts = experts, p.top_k = top_k, p.k = 80, p.intermediate = 48;
  Moe hopper = p, wide = p;
  hopper.has_wgmma = true, wide.dtype = DType::kFloat32;
  for (Moe* each : {&p, &hopper, &wide}) {
    moe_plan(*each);
    std::printf("%d %ld %ld %ld ", each->tile_m, long(each->num_tiles), long(each->copied_stride), long(each->act_stride));
  }
  const MoeWorkspace space = moe_workspace(p), of_floats = moe_workspace(wide);
  std::printf("%zu %zu %zu %zu %zu %zu %d\n", space.sorted_pairs, space.tiles, space.copied_x, space.act, space.pair_out,
              of_floats.act, p.permutes_k ? 1 : 0);
}
int main() {
  long tokens, experts, top_k, is_int4;
  while (std::scanf("%ld %ld %ld %ld", &tokens, &experts, &top_k, &is_int4) == 4) {
    Int4Moe packed;
    packed.w13_k = 256, packed.w2_k = 128;
    is_int4 ? print(packed, tokens, experts, top_k) : print(Nvfp4Moe{}, tokens, experts, top_k);
  }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(SOURCE, tmp_path_factory.mktemp("plan"))


def plans(program: Path, cases: list[tuple[int, int, int]], is_int4: bool = False) -> list[list[int]]:
    """For tokens, experts and top_k: tile_m, num_tiles and strides on sm_80, on sm_90 and in float32; bytes of the workspace."""
    text = "\n".join(" ".join(map(str, (*case, int(is_int4)))) for case in cases)
    done = subprocess.run([program], input=text, capture_output=True, text=True, check=True)
    return [list(map(int, line.split())) for line in done.stdout.splitlines()]


def test_tile_m(program: Path) -> None:
    """By the mean M of an expert: of Qwen3-30B-A3B's 128 with 8 a token, 16 tokens are one row each."""
    tokens = [1, 16, 47, 48, 128, 144, 256, 400, 2048]
    found = plans(program, [(m, 128, 8) for m in tokens])
    assert [(plan[0], plan[4], plan[8]) for plan in found] == [
        (8, 8, 8), (8, 8, 8), (8, 8, 8), (16, 16, 8), (16, 16, 8), (32, 32, 8), (32, 32, 8), (64, 160, 8),
        (64, 160, 8),
    ]  # fmt: skip


def test_strides_and_bytes(program: Path) -> None:
    (plan,) = plans(program, [(5, 4, 2)])
    assert plan[2:4] == [128, 64]
    assert plan[10:12] == [80, 48]
    assert plan[12:] == [10 * 4, plan[1] * 16, 5 * 128 * 2, 10 * 64 * 2, 10 * 80 * 4, 10 * 48 * 4, 1]


def test_int4_pads_to_the_weights(program: Path) -> None:
    """Rows of x and act are as wide as the weights are stored; in float32 they stay as they are."""
    (plan,) = plans(program, [(5, 4, 2)], is_int4=True)
    (other,) = plans(program, [(5, 4, 2)])
    assert [plan[i] for i in (0, 1, 4, 5, 8, 9)] == [other[i] for i in (0, 1, 4, 5, 8, 9)]
    assert (plan[2:4], plan[6:8], plan[10:12]) == ([256, 128], [256, 128], [80, 48])
    assert plan[12:] == [10 * 4, plan[1] * 16, 5 * 256 * 2, 10 * 128 * 2, 10 * 80 * 4, 10 * 48 * 4, 0]


def test_num_tiles_bound(program: Path) -> None:
    chance = random.Random(0)
    cases = [(0, 4, 2), (3, 0, 2), (3, 4, 0), (1, 1, 1)]
    cases += [(chance.randint(1, 400), chance.choice([1, 2, 7, 64, 300]), chance.randint(1, 9)) for _ in range(300)]
    for (tokens, experts, top_k), plan in zip(cases, plans(program, cases), strict=True):
        pairs = tokens * top_k
        for tile_m, num_tiles in (plan[0:2], plan[4:6], plan[8:10]):
            assert num_tiles <= pairs
            if experts == 0:
                assert num_tiles == 0
                continue
            # As many experts as there can be with one row more than full tiles: nothing needs more tiles.
            counts = [1] * min(experts, pairs)
            for i in range((pairs - len(counts)) // tile_m):
                counts[i % len(counts)] += tile_m
            assert sum(-(-count // tile_m) for count in counts) <= num_tiles
