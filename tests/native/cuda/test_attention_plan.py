"""Which problems the WGMMA attention kernel takes, and its tiles on an H100, compiled from its plan. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cmath>
#include <cstdio>
#include "kernels/cuda/attention/flash_wgmma_plan.cu"
namespace untorch::kernels::cuda {
AttentionPlan plan_attention(const Attention& p, int, int) {
  AttentionPlan plan;
  plan.splits = p.keys > 1024 ? 4 : 1;
  return plan;
}
int attention_wgmma_float16(const Attention&, const WgmmaAttentionPlan&, Stream) { return 16; }
int attention_wgmma_bfloat16(const Attention&, const WgmmaAttentionPlan&, Stream) { return 17; }
}  // namespace untorch::kernels::cuda
using namespace untorch;
using namespace untorch::kernels::cuda;
alignas(16) char memory[32];
Attention problem(int batch, int heads, int queries, int keys, int width) {
  Attention p;
  p.dtype = DType::kBFloat16, p.batch = batch, p.heads = p.kv_heads = heads, p.queries = queries, p.keys = keys;
  p.width = p.value_width = width;
  const Heads q{memory, std::int64_t{queries} * heads * width, width, std::int64_t{heads} * width};
  const Heads k{memory, std::int64_t{keys} * heads * width, width, std::int64_t{heads} * width};
  p.query = p.out = q, p.key = p.value = k;
  return p;
}
void print(const Attention& p) {
  const WgmmaAttentionPlan plan = plan_attention_wgmma(p, 132, 50 << 20);
  std::printf("%d %d %d %d %d %d %d %d %d %d %d\n", plan.valid, plan.width, plan.warpgroups, plan.row_blocks, plan.items,
              plan.ctas, plan.vector_out, plan.paired, plan.section, plan.alternates, plan.first_row);
}
int main() {
  const std::int32_t lengths[2] = {};
  $CODE
}
"""


def plans(folder: Path, *problems: str) -> list[list[int]]:
    """Of a problem, changed by statements on `p`: valid, width, warpgroups, row_blocks, items, ctas, vector_out, paired,
    section, alternates, first_row."""
    code = "\n  ".join(f"{{ Attention p = {problem}; print(p); }}" for problem in problems)
    return [[int(number) for number in line.split()] for line in lines_of(SOURCE.replace("$CODE", code), folder)]


def test_tiles(tmp_path: Path) -> None:
    shapes = [(4, 16, 4096, 128), (1, 20, 1500, 64), (8, 32, 4096, 64), (1, 12, 197, 64), (2, 8, 1000, 72)]
    got = plans(tmp_path, *(f"problem({b}, {h}, {n}, {n}, {d})" for b, h, n, d in shapes))
    assert [plan[:7] for plan in got] == [
        [1, 128, 2, 32, 2048, 132, 1], [1, 64, 2, 12, 240, 132, 1], [1, 64, 3, 22, 5632, 132, 1],
        [1, 64, 2, 2, 24, 24, 1], [1, 96, 2, 8, 128, 128, 1],
    ]  # fmt: skip
    assert all(plan[7:] == [0, 1, 0, 0] for plan in got)


def test_causal_row_blocks(tmp_path: Path) -> None:
    """In pairs that cost the same where these fill the GPU or cost the least; else single ones, whose order alternates
    where keys and values stay in L2; else one a CTA, and those of the heads in flight take half of L2."""
    shapes = {
        (4, 16, 4096, 128): [32, 1024, 132, 1, 1, 0, 0],
        (2, 32, 2048, 64): [11, 384, 132, 1, 1, 0, -64],
        (1, 16, 1024, 128): [8, 128, 128, 0, 16, 1, 0],
        (4, 20, 4096, 128): [32, 1280, 132, 1, 1, 0, 0],
        (64, 8, 100, 128): [1, 512, 132, 0, 1, 0, 0],
        (16, 12, 1000, 64): [6, 576, 132, 1, 1, 0, -128],
        (8, 12, 1100, 64): [6, 576, 132, 0, 96, 1, 0],
        (1, 17, 8192, 128): [64, 1088, 1088, 0, 6, 0, 0],
    }
    got = plans(tmp_path, *(f"problem({b}, {h}, {n}, {n}, {d}); p.right = 0" for b, h, n, d in shapes))
    assert [plan[3:6] + plan[7:] for plan in got] == list(shapes.values())


def test_divisors(tmp_path: Path) -> None:
    """Multiplications in the place of divisions, for values below 2^31."""
    code = """
  for (const int by : {1, 2, 3, 5, 6, 7, 11, 12, 64, 127, 132, 1000, 65535, 65536, 1048577, 1073741823, 2147483647}) {
    const Divisor d = divisor(by);
    for (const std::uint32_t about : {0u, 1u, 1u * by, 7u * by, 12345678u / by * by, 2147483647u / by * by, 2147483646u}) {
      for (int more = -2; more < 3; ++more) {
        const std::uint32_t value = about + more;
        if (value > 2147483647u) continue;
        const std::uint32_t high = std::uint64_t{value} * d.multiplier >> 32;
        if ((d.multiplier == 0 ? value : high >> d.shift) != value / by) std::printf("%d %u\\n", by, value);
      }
    }
  }
"""
    assert lines_of(SOURCE.replace("$CODE", code), tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "p.dtype = DType::kFloat32", "p.bias = memory", "p.scale = 0", "p.scale = -1", "p.scale = NAN", "p.left = 3",
        "p.first_query = p.first_key = lengths", "p.used_keys = lengths", "p.queries = 64", "p.keys = 0",
        "p.key.row = 0", "p.width = 257", "p.query.head = std::int64_t{1} << 39",
    ],
)  # fmt: skip
def test_problems_of_the_other_kernel(tmp_path: Path, change: str) -> None:
    [before, after] = plans(tmp_path, "problem(2, 8, 1000, 1000, 64)", f"problem(2, 8, 1000, 1000, 64); {change}")
    assert before[0] == 1 and after[0] == 0


def test_few_tiles_over_long_keys_are_split(tmp_path: Path) -> None:
    """The other kernel splits the keys over CTAs, this one does not."""
    lengths = [(512, 8192), (512, 1000), (2048, 8192)]
    got = plans(tmp_path, *(f"problem(1, 8, {queries}, {keys}, 128)" for queries, keys in lengths))
    assert [plan[0] for plan in got] == [0, 1, 1]


def test_results_that_are_not_aligned(tmp_path: Path) -> None:
    shape = "problem(2, 8, 1000, 1000, 64)"
    got = plans(
        tmp_path,
        shape,
        f"{shape}; p.out.data = memory + 2",
        f"{shape}; p.out.row = 515",
        f"{shape}; p.value_width = 60",
    )
    assert [plan[6] for plan in got] == [1, 0, 0, 0]
