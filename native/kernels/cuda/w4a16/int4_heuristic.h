// Heuristic of the int4 W4A16 GEMM: which algorithm serves a problem on a GPU.
#pragma once

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/int4.h"

namespace untorch::kernels::cuda {

// kDequantizeChunks: dequantize a chunk of columns, then cuBLASLt, chunk after chunk. kDequantized: cuBLASLt, with a
// dequantized copy of the weight that the loader made.
enum class Int4Algorithm : std::int8_t { kGemv, kGemmSm80, kDequantizeChunks, kGemmSm90, kDequantized };

// Measured by benchmarks/gpu_int4.py on an H200; its options override them for a run.
struct Int4Thresholds {
  GemvMaxM gemv_max_m;
  Sm90MaxM sm90_max_m;                      // where the GPU has the sm_90 GEMM
  std::int64_t sm90_tile_m = 0;             // W4A16Gemm::tile_m
  std::int64_t sm80_max_m_beside_sm90 = 0;  // of the sm_80 GEMM above sm90_max_m
  std::int64_t sm80_max_m = 256;            // of the sm_80 GEMM where the GPU has no sm_90 GEMM
  PackedMaxM packed_max_m;
};

// Dynamic shared memory of the GEMV's CTAs, at most, for M up to 8 and up to 16.
inline constexpr int kInt4GemvSharedBytes = 153600, kInt4GemvSharedBytesM16 = 227328;
inline bool int4_gemv_fits(const Int4Gemm& p) {
  return p.max_shared_bytes >= (p.m <= 8 ? kInt4GemvSharedBytes : kInt4GemvSharedBytesM16) &&
         (p.m <= 8 || p.inner_k_tiles == 8);
}

// By dtype, M, inner_k_tiles, the GPU's features, and whether a dequantized copy of the weight lies there.
inline Int4Algorithm choose_int4_algorithm(const Int4Gemm& p, const Int4Thresholds& thresholds = {},
                                           bool has_dequantized = false) {
  const bool has_kernels = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  const bool has_sm90 = p.has_wgmma && p.inner_k_tiles == 8;
  if (has_dequantized && (!has_kernels || p.m > thresholds.packed_max_m.of(p, has_sm90))) {
    return Int4Algorithm::kDequantized;
  }
  if (!has_kernels) return Int4Algorithm::kDequantizeChunks;
  if (p.m <= thresholds.gemv_max_m.of(p, has_sm90) && int4_gemv_fits(p)) return Int4Algorithm::kGemv;
  if (!has_sm90) {
    return p.m <= thresholds.sm80_max_m ? Int4Algorithm::kGemmSm80 : Int4Algorithm::kDequantizeChunks;
  }
  if (p.m <= thresholds.sm90_max_m.of(p)) return Int4Algorithm::kGemmSm90;
  return p.m <= thresholds.sm80_max_m_beside_sm90 ? Int4Algorithm::kGemmSm80 : Int4Algorithm::kDequantizeChunks;
}

}  // namespace untorch::kernels::cuda
