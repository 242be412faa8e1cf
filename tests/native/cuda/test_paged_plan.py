"""Which steps the paged prefill kernel takes, its tiles and its grid, compiled from its plan. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cmath>
#include <cstdio>
#include "kernels/cuda/attention/paged_plan.cu"
namespace untorch::kernels::cuda {
int paged_prefill_float16(const PagedPrefill&, const PagedPrefillPlan&, Stream) { return 16; }
int paged_prefill_bfloat16(const PagedPrefill&, const PagedPrefillPlan&, Stream) { return 17; }
int paged_decode_sm90(const PagedPrefill&, const PagedDecodePlan&, Stream) { return 18; }
}  // namespace untorch::kernels::cuda
using namespace untorch;
using namespace untorch::kernels::cuda;
alignas(16) char memory[32];
PagedPrefill problem(int tokens, int sequences, int heads, int kv_heads, int width, int block) {
  PagedPrefill p;
  p.dtype = DType::kBFloat16, p.tokens = tokens, p.sequences = sequences, p.heads = heads, p.kv_heads = kv_heads;
  p.width = width, p.block = block, p.q = p.pool = memory, p.out = memory, p.blocks = 100, p.table_columns = 50;
  p.pool_block = std::int64_t{2} * kv_heads * block * width;
  return p;
}
void print(const PagedPrefill& p) {
  const PagedPrefillPlan plan = plan_paged_prefill(p, 132);
  std::printf("%d %d %d %d %d %d %d %d %d %d\n", plan.valid, plan.width, plan.row_heads, plan.row_tokens, plan.head_tiles,
              plan.row_blocks, plan.items, plan.ctas, plan.box_rows, paged_prefill(p, plan, nullptr));
}
void print_decode(PagedPrefill p, int few) {
  p.few = few;
  const PagedDecodePlan plan = plan_paged_decode(p, 132);
  std::printf("%d %d %d %d %d %d\n", plan.valid, plan.heads, plan.each, plan.units, plan.cluster_bits,
              paged_decode(p, plan, nullptr));
}
int main() {
  $CODE
}
"""


def decode_plans(folder: Path, *problems: str) -> list[list[int]]:
    """Of a problem and `few`: valid, heads, each, units, cluster_bits, and what the launcher gives."""
    code = "\n  ".join(
        f"print_decode(problem({problem}));".replace("; ", "), ", 1).replace("));", ");") for problem in problems
    )
    return [[int(number) for number in line.split()] for line in lines_of(SOURCE.replace("$CODE", code), folder)]


def plans(folder: Path, *problems: str) -> list[list[int]]:
    """Of a problem, changed by statements on `p`: valid, width, row_heads, row_tokens, head_tiles, row_blocks, items, ctas,
    box_rows, and what the launcher gives."""
    code = "\n  ".join(f"{{ PagedPrefill p = {problem}; print(p); }}" for problem in problems)
    return [[int(number) for number in line.split()] for line in lines_of(SOURCE.replace("$CODE", code), folder)]


def test_tiles(tmp_path: Path) -> None:
    """A row block has 128 rows, 192 with heads of 64, of the heads of a KV head, at most 64; a sequence begins a new one."""
    got = plans(
        tmp_path, "problem(2048, 1, 32, 8, 128, 16)", "problem(300, 7, 28, 4, 64, 32)", "problem(10, 2, 71, 1, 64, 16)",
        "problem(10, 2, 8, 8, 72, 48)", "problem(10, 2, 8, 8, 104, 256)", "problem(10, 2, 8, 8, 200, 64)",
        "problem(10, 2, 8, 8, 128, 16); p.dtype = DType::kFloat16",
    )  # fmt: skip
    assert got == [
        [1, 128, 4, 32, 1, 65, 520, 132, 16, 17], [1, 64, 7, 27, 1, 18, 72, 72, 32, 17],
        [1, 64, 36, 5, 2, 4, 8, 8, 16, 17], [1, 96, 1, 128, 1, 2, 16, 16, 16, 17],
        [1, 128, 1, 128, 1, 2, 16, 16, 128, 17], [1, 256, 1, 128, 1, 2, 16, 16, 16, 17],
        [1, 128, 1, 128, 1, 2, 16, 16, 16, 16],
    ]  # fmt: skip


def test_without_prompts_nothing_is_launched(tmp_path: Path) -> None:
    got = plans(tmp_path, "problem(64, 64, 32, 8, 128, 16)", "problem(65, 64, 32, 8, 128, 16)")
    assert [(plan[0], plan[6], plan[7], plan[9]) for plan in got] == [(1, 0, 0, 0), (1, 66 * 8, 132, 17)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "p.dtype = DType::kFloat32", "p.width = 264", "p.width = 60", "p.scale = 0", "p.scale = NAN", "p.kv_heads = 5",
        "p.block = 8", "p.block = 24", "p.pool_block += 8", "p.blocks = 0", "p.blocks = std::int64_t{1} << 28",
        "p.table_columns = 1 << 28", "p.q = memory + 2", "p.pool = memory + 8", "p.out = memory + 4",
    ],
)  # fmt: skip
def test_what_it_does_not_take(tmp_path: Path, change: str) -> None:
    [before, after] = plans(tmp_path, *(f"problem(300, 2, 32, 8, 64, 16){more}" for more in ("", f"; {change}")))
    assert before[0] == 1 and (after[0], after[9]) == (0, 1)


def test_slots_of_decode(tmp_path: Path) -> None:
    """A cluster for each token by a KV head, as large as the GPU has SMs for; in steps with prompts for each sequence."""
    got = decode_plans(
        tmp_path, "1, 1, 32, 8, 128, 16; 4", "4, 4, 32, 8, 128, 16; 4", "64, 64, 28, 4, 64, 16; 2",
        "16, 16, 64, 8, 128, 16; 4", "5, 8, 8, 8, 64, 16; 4", "300, 2, 32, 8, 128, 16; 4", "300, 40, 32, 8, 128, 16; 4",
        "0, 3, 32, 8, 128, 16; 4",
    )  # fmt: skip
    assert got == [
        [1, 4, 1, 8, 3, 18], [1, 4, 1, 32, 2, 18], [1, 8, 1, 256, 0, 18], [1, 8, 1, 128, 0, 18],
        [1, 4, 1, 40, 1, 18], [1, 4, 4, 96, 0, 18], [1, 4, 1, 41 * 8, 0, 18], [1, 4, 1, 0, 3, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("problem", ["2, 2, 32, 8, 96, 16; 4", "2, 2, 72, 8, 64, 16; 4", "2, 2, 32, 8, 64, 16; 0"])
def test_what_is_not_decoded(tmp_path: Path, problem: str) -> None:
    [[valid, *_, launched]] = decode_plans(tmp_path, problem)
    assert (valid, launched) == (0, 1)
