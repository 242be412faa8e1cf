"""The algorithm of an NVFP4 W4A16 GEMM on CUDA, compiled from its header. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
using namespace untorch;
using namespace untorch::kernels::cuda;
int main() {
  const char* const names[] = {"gemv", "sm80", "sm90", "chunks", "fp8", "fp4", "dequantized"};
  for (long m : {1, 8, 9, 16, 17, 64, 256, 257, 512, 513, 1024, 1025, 4096, 4097}) {
    Nvfp4Gemm h200, a100, l4;
    h200.m = a100.m = l4.m = m;
    h200.max_shared_bytes = 232448, a100.max_shared_bytes = 166912, l4.max_shared_bytes = 101376;
    h200.has_clusters = h200.has_wgmma = true;
    Nvfp4Gemm few_k_tiles = h200, bytes = h200, wide = h200;
    few_k_tiles.inner_k_tiles = 4;
    bytes.inner_k_tiles = 0;
    a100.dtype = DType::kFloat16;
    wide.dtype = DType::kFloat32;
    const Nvfp4Gemm small = h200;
    for (Nvfp4Gemm* p : {&h200, &a100, &l4, &few_k_tiles, &bytes, &wide}) p->n = p->k = 4096;
    std::printf("M %ld", m);
    for (const Nvfp4Gemm& p : {small, h200, a100, l4, few_k_tiles, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4_algorithm(p))]);
    }
    Nvfp4Gemm large = h200;
    large.n = 16384, large.k = 8192;
    std::printf(" %s", names[int(choose_nvfp4_algorithm(large))]);
    Nvfp4Thresholds without_sm90;
    without_sm90.sm90_max_m.set(0), without_sm90.sm80_max_m_beside_sm90 = 64;
    std::printf(" %s;", names[int(choose_nvfp4_algorithm(h200, without_sm90))]);
    for (const Nvfp4Gemm& p : {h200, l4, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4_algorithm(p, {}, untorch::kernels::Nvfp4Prefill::kFp8))]);
    }
    for (const Nvfp4Gemm& p : {h200, l4, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4_algorithm(p, {}, untorch::kernels::Nvfp4Prefill::kFp4))]);
    }
    std::printf("; %s", names[int(choose_nvfp4_algorithm(large, {}, untorch::kernels::Nvfp4Prefill::kExact, true))]);
    for (const Nvfp4Gemm& p : {small, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4_algorithm(p, {}, untorch::kernels::Nvfp4Prefill::kFp8, true))]);
    }
    std::printf("\n");
  }
}
"""


def test_the_choice(tmp_path: Path) -> None:
    lines = lines_of(SOURCE, tmp_path)
    # On an H200 with a small weight and a larger one, an A100 and an L4, which has little shared memory; with 4 inner k
    # tiles; of bytes; in float32; large; on an H200 without nvfp4_gemm_sm90. Then, with prefill fp8, on an H200 and an
    # L4, of bytes, and in float32; and with fp4. Then, with a dequantized copy beside the weight, a large one; and with
    # prefill fp8 a small one, of bytes, and in float32.
    assert lines == [
        "M 1 gemv gemv gemv sm80 chunks chunks chunks sm90 gemv; "
        "gemv sm80 chunks chunks gemv sm80 chunks chunks; sm90 gemv dequantized dequantized",
        "M 8 gemv gemv gemv sm80 chunks chunks chunks sm90 gemv; "
        "gemv sm80 chunks chunks gemv sm80 chunks chunks; sm90 gemv dequantized dequantized",
        "M 9 gemv gemv sm80 sm80 chunks chunks chunks sm90 gemv; "
        "gemv sm80 chunks chunks gemv sm80 chunks chunks; sm90 dequantized dequantized dequantized",
        "M 16 gemv gemv sm80 sm80 chunks chunks chunks sm90 gemv; "
        "gemv sm80 chunks chunks gemv sm80 chunks chunks; sm90 dequantized dequantized dequantized",
        "M 17 sm90 sm90 sm80 sm80 chunks chunks chunks sm90 sm80; "
        "sm90 sm80 chunks chunks sm90 sm80 chunks chunks; sm90 dequantized dequantized dequantized",
        "M 64 sm90 sm90 sm80 sm80 chunks chunks chunks sm90 sm80; "
        "sm90 sm80 chunks chunks sm90 sm80 chunks chunks; sm90 dequantized dequantized dequantized",
        "M 256 sm90 sm90 sm80 sm80 chunks chunks chunks sm90 chunks; "
        "sm90 sm80 chunks chunks sm90 sm80 chunks chunks; sm90 dequantized dequantized dequantized",
        "M 257 chunks sm90 chunks chunks chunks chunks chunks sm90 chunks; "
        "sm90 chunks chunks chunks fp4 fp4 fp4 fp4; dequantized dequantized dequantized dequantized",
        "M 512 chunks sm90 chunks chunks chunks chunks chunks sm90 chunks; "
        "sm90 chunks chunks chunks fp4 fp4 fp4 fp4; dequantized dequantized dequantized dequantized",
        "M 513 chunks sm90 chunks chunks chunks chunks chunks sm90 chunks; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; dequantized fp8 fp8 fp8",
        "M 1024 chunks sm90 chunks chunks chunks chunks chunks sm90 chunks; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; dequantized fp8 fp8 fp8",
        "M 1025 chunks chunks chunks chunks chunks chunks chunks sm90 chunks; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; dequantized fp8 fp8 fp8",
        "M 4096 chunks chunks chunks chunks chunks chunks chunks sm90 chunks; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; dequantized fp8 fp8 fp8",
        "M 4097 chunks chunks chunks chunks chunks chunks chunks chunks chunks; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; dequantized fp8 fp8 fp8",
    ]


OBSTACLES = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
using namespace untorch;
using namespace untorch::kernels::cuda;
using untorch::kernels::Nvfp4Prefill;
int main() {
  for (int gpu : {80, 86, 89, 90, 100, 103, 110, 120, 121}) {
    for (Nvfp4Prefill prefill : {Nvfp4Prefill::kExact, Nvfp4Prefill::kFp8, Nvfp4Prefill::kFp4}) {
      const char* const obstacle = prefill_obstacle(prefill, gpu / 10, gpu % 10);
      std::printf("%d: %s\n", gpu, obstacle == nullptr ? "" : obstacle);
    }
  }
}
"""


def test_gpus_that_cannot_do_what_is_asked_for(tmp_path: Path) -> None:
    lines = lines_of(OBSTACLES, tmp_path)
    fp8 = "prefill 'fp8' needs a GPU of compute capability 8.9 or newer: quantise with prefill='exact'"
    fp4 = "prefill 'fp4' needs a GPU that multiplies NVFP4 by NVFP4 (sm_100, sm_103, sm_120 or sm_121): quantise with "
    expected = []
    for gpu in (80, 86, 89, 90, 100, 103, 110, 120, 121):
        instead = fp4 + ("prefill='exact'" if gpu < 89 else "prefill='fp8' or 'exact'")
        serves = gpu in (100, 103, 120, 121)
        expected += [f"{gpu}: ", f"{gpu}: {fp8 if gpu < 89 else ''}", f"{gpu}: {'' if serves else instead}"]
    assert lines == expected
