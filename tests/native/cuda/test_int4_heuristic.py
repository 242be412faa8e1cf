"""The algorithm of an int4 W4A16 GEMM on CUDA, compiled from its header. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

from tests.native.cuda.compiled import lines_of

SOURCE = r"""
#include <cstdio>
#include <initializer_list>
#include "kernels/cuda/w4a16/int4_heuristic.h"
#include "kernels/cuda/w4a16/heuristic.h"
using namespace untorch;
using namespace untorch::kernels::cuda;
int main() {
  const char* const names[] = {"gemv", "sm80", "chunks", "sm90", "dequantized"};
  for (long m : {1, 8, 9, 16, 17, 32, 33, 128, 129, 256, 257, 1024, 1025, 2049, 4096, 4097}) {
    Int4Gemm h200, a100, l4;
    h200.m = a100.m = l4.m = m;
    h200.max_shared_bytes = 232448, a100.max_shared_bytes = 166912, l4.max_shared_bytes = 101376;
    h200.has_clusters = h200.has_wgmma = true;
    Int4Gemm few_k_tiles = h200, wide = h200, large = h200, small = h200, medium = h200, long_sums = h200;
    few_k_tiles.inner_k_tiles = 4;
    a100.dtype = DType::kFloat16;
    wide.dtype = DType::kFloat32;
    large.n = 16384, large.k = 8192, small.n = 768, small.k = 2048, medium.n = 4096, medium.k = 3072;
    long_sums.n = 4096, long_sums.k = 14336;
    for (Int4Gemm* p : {&h200, &a100, &l4, &few_k_tiles, &wide}) p->n = p->k = 4096;
    std::printf("M %ld", m);
    for (const Int4Gemm& p : {small, medium, h200, long_sums, large, a100, l4, few_k_tiles, wide}) {
      std::printf(" %s", names[int(choose_int4_algorithm(p))]);
    }
    std::printf(";");
    for (const Int4Gemm& p : {small, h200, large, a100, wide}) {
      std::printf(" %s", names[int(choose_int4_algorithm(p, {}, true))]);
    }
    Int4Gemm without_sm90 = large;
    without_sm90.has_wgmma = false;
    std::printf("; %s\n", names[int(choose_int4_algorithm(without_sm90))]);
  }
  for (int m : {1, 16, 17, 32, 33, 64, 65, 500}) {
    std::printf("tile %d %d %d %d\n", m, sm80_tile_m(m, 232448), sm80_tile_m(m, 166912),
                sm80_tile_m(m, 101376));
  }
  const auto chunk = [](long m, long n, long k, int bytes) {
    W4A16Gemm p;
    p.m = m, p.n = n, p.k = k, p.num_sms = 132;
    return long(dequantize_chunk_n(p, bytes, 60l << 20));
  };
  std::printf("chunk %ld %ld %ld %ld\n", chunk(2048, 28672, 8192, 2), chunk(4096, 28672, 8192, 2),
              chunk(1024, 28672, 8192, 2), chunk(2048, 4096, 14336, 2));
  std::printf("chunk %ld %ld %ld %ld\n", chunk(300, 8, 8192, 2), chunk(300, 264, 1 << 20, 4), chunk(300, 520, 128, 2),
              chunk(8192, 3000, 0, 2));
}
"""


def test_the_choice(tmp_path: Path) -> None:
    lines = lines_of(SOURCE, tmp_path)
    # On an H200 with weights of five sizes; an A100 and an L4, which has little shared memory; with 4 inner k tiles; in
    # float32. Then, with a dequantized copy beside the weight, on an H200 small, medium and large, on an A100, and in
    # float32. Then a large one where the GPU has much shared memory and no int4_gemm_sm90.
    assert lines == [
        "M 1 gemv gemv gemv gemv sm90 gemv sm80 gemv chunks; gemv gemv sm90 gemv dequantized; gemv",
        "M 8 gemv gemv gemv gemv sm90 gemv sm80 gemv chunks; gemv gemv sm90 gemv dequantized; gemv",
        "M 9 gemv gemv gemv sm90 sm90 sm80 sm80 sm80 chunks; dequantized gemv sm90 sm80 dequantized; gemv",
        "M 16 gemv gemv gemv sm90 sm90 sm80 sm80 sm80 chunks; dequantized gemv sm90 sm80 dequantized; gemv",
        "M 17 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized sm90 sm90 dequantized dequantized; sm80",
        "M 32 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized sm90 sm90 dequantized dequantized; sm80",
        "M 33 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized sm90 sm90 dequantized dequantized; sm80",
        "M 128 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized dequantized sm90 dequantized dequantized; sm80",
        "M 129 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized dequantized sm90 dequantized dequantized; sm80",
        "M 256 sm90 sm90 sm90 sm90 sm90 sm80 sm80 sm80 chunks; dequantized dequantized sm90 dequantized dequantized; sm80",
        "M 257 chunks sm90 sm90 sm90 sm90 chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "M 1024 chunks sm90 sm90 sm90 sm90 chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "M 1025 chunks chunks chunks sm90 sm90 chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "M 2049 chunks chunks chunks chunks sm90 chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "M 4096 chunks chunks chunks chunks sm90 chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "M 4097 chunks chunks chunks chunks chunks chunks chunks chunks chunks; dequantized dequantized dequantized dequantized dequantized; chunks",
        "tile 1 16 16 16",
        "tile 16 16 16 16",
        "tile 17 32 32 32",
        "tile 32 32 32 32",
        "tile 33 64 64 32",
        "tile 64 64 64 32",
        "tile 65 128 128 32",
        "tile 500 128 128 32",
        "chunk 6144 7168 4096 4096",
        "chunk 8 264 520 3000",
    ]
