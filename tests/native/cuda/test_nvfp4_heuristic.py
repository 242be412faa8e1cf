"""Which kernel serves an NVFP4 product on CUDA, compiled from its header. Needs no GPU."""

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
  const char* const names[] = {"narrow", "mma", "stream", "unpack", "fp8", "fp4", "whole"};
  for (long m : {1, 8, 9, 16, 17, 64, 256, 257, 512, 513, 1024, 1025, 4096, 4097}) {
    Nvfp4Gemm h200, a100, l4;
    h200.m = a100.m = l4.m = m;
    h200.max_shared_bytes = 232448, a100.max_shared_bytes = 166912, l4.max_shared_bytes = 101376;
    h200.has_clusters = h200.has_wgmma = true;
    Nvfp4Gemm narrow_lanes = h200, bytes = h200, wide = h200;
    narrow_lanes.inner_k_tiles = 4;
    bytes.inner_k_tiles = 0;
    a100.dtype = DType::kFloat16;
    wide.dtype = DType::kFloat32;
    const Nvfp4Gemm small = h200;
    for (Nvfp4Gemm* p : {&h200, &a100, &l4, &narrow_lanes, &bytes, &wide}) p->n = p->k = 4096;
    std::printf("rows %ld", m);
    for (const Nvfp4Gemm& p : {small, h200, a100, l4, narrow_lanes, bytes, wide}) {
      std::printf(" %s", names[int(choose_nvfp4_algorithm(p))]);
    }
    Nvfp4Gemm large = h200;
    large.n = 16384, large.k = 8192;
    std::printf(" %s", names[int(choose_nvfp4_algorithm(large))]);
    Nvfp4Thresholds without_sm90;
    without_sm90.stream.set(0), without_sm90.mma_rows = 64;
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
    # tiles; of bytes; in float32; large; on an H200 without nvfp4_gemm_sm90. Then, where fp8 is asked for, on an H200 and an
    # L4, of bytes, and in float32; and fp4. Then, with unpacked weights at hand, a large one; and where fp8 is asked for
    # a small one, of bytes, and in float32.
    assert lines == [
        "rows 1 narrow narrow narrow mma unpack unpack unpack stream narrow; "
        "narrow mma unpack unpack narrow mma unpack unpack; stream narrow whole whole",
        "rows 8 narrow narrow narrow mma unpack unpack unpack stream narrow; "
        "narrow mma unpack unpack narrow mma unpack unpack; stream narrow whole whole",
        "rows 9 narrow narrow mma mma unpack unpack unpack stream narrow; "
        "narrow mma unpack unpack narrow mma unpack unpack; stream whole whole whole",
        "rows 16 narrow narrow mma mma unpack unpack unpack stream narrow; "
        "narrow mma unpack unpack narrow mma unpack unpack; stream whole whole whole",
        "rows 17 stream stream mma mma unpack unpack unpack stream mma; "
        "stream mma unpack unpack stream mma unpack unpack; stream whole whole whole",
        "rows 64 stream stream mma mma unpack unpack unpack stream mma; "
        "stream mma unpack unpack stream mma unpack unpack; stream whole whole whole",
        "rows 256 stream stream mma mma unpack unpack unpack stream unpack; "
        "stream mma unpack unpack stream mma unpack unpack; stream whole whole whole",
        "rows 257 unpack stream unpack unpack unpack unpack unpack stream unpack; "
        "stream unpack unpack unpack fp4 fp4 fp4 fp4; whole whole whole whole",
        "rows 512 unpack stream unpack unpack unpack unpack unpack stream unpack; "
        "stream unpack unpack unpack fp4 fp4 fp4 fp4; whole whole whole whole",
        "rows 513 unpack stream unpack unpack unpack unpack unpack stream unpack; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; whole fp8 fp8 fp8",
        "rows 1024 unpack stream unpack unpack unpack unpack unpack stream unpack; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; whole fp8 fp8 fp8",
        "rows 1025 unpack unpack unpack unpack unpack unpack unpack stream unpack; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; whole fp8 fp8 fp8",
        "rows 4096 unpack unpack unpack unpack unpack unpack unpack stream unpack; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; whole fp8 fp8 fp8",
        "rows 4097 unpack unpack unpack unpack unpack unpack unpack unpack unpack; "
        "fp8 fp8 fp8 fp8 fp4 fp4 fp4 fp4; whole fp8 fp8 fp8",
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
