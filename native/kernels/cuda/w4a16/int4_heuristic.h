// Which kernel serves a product with int4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/int4.h"

namespace untorch::kernels::cuda {

// kDequantized: by cuBLASLt, from a weight that lies unpacked beside the packed one.
enum class Int4Path : std::int8_t { kGemv, kGemmSm80, kDequantizeChunks, kGemmSm90, kDequantized };

// Read off benchmarks/gpu_int4.py on an H200, whose options move them for a run.
struct Int4Limits {
  GemvMLimit narrow;                  // of int4_gemv
  Sm90MLimit stream;                  // of int4_gemm_sm90, where the GPU has it
  std::int64_t tile_rows = 0;         // of its tiles: W4A16Gemm::tile_rows
  std::int64_t mma_rows = 0;          // above those, of int4_gemm_sm80
  std::int64_t mma_rows_alone = 256;  // of int4_gemm_sm80, where the GPU has no int4_gemm_sm90
  DequantizedMLimit whole;
};

// Shared memory of int4_gemv's blocks at most, with so many rows.
inline constexpr int kInt4GemvSharedBytes = 153600, kInt4GemvSharedBytesM16 = 227328;
inline bool int4_gemv_fits(const Int4Gemm& p) {
  return p.max_shared_bytes >= (p.m <= 8 ? kInt4GemvSharedBytes : kInt4GemvSharedBytesM16) &&
         (p.m <= 8 || p.inner_k_tiles == 8);
}

// By dtype, m, inner_k_tiles, what the GPU can, and whether the weight lies there unpacked, too.
inline Int4Path choose_int4_kernel(const Int4Gemm& p, const Int4Limits& limits = {}, bool has_whole = false) {
  const bool has_kernels = p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16;
  const bool has_stream = p.has_wgmma && p.inner_k_tiles == 8;
  if (has_whole && (!has_kernels || p.m > limits.whole.of(p, has_stream))) return Int4Path::kDequantized;
  if (!has_kernels) return Int4Path::kDequantizeChunks;
  if (p.m <= limits.narrow.of(p, has_stream) && int4_gemv_fits(p)) return Int4Path::kGemv;
  if (!has_stream) {
    return p.m <= limits.mma_rows_alone ? Int4Path::kGemmSm80 : Int4Path::kDequantizeChunks;
  }
  if (p.m <= limits.stream.of(p)) return Int4Path::kGemmSm90;
  return p.m <= limits.mma_rows ? Int4Path::kGemmSm80 : Int4Path::kDequantizeChunks;
}

}  // namespace untorch::kernels::cuda
