// Which kernel serves a product with int4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/int4.h"

namespace untorch::kernels::cuda {

enum class Int4Path : std::int8_t { kNarrow, kMma, kWgmma, kUnpack, kStream };

// Read off benchmarks/gpu_int4.py on an H200, whose --mma-rows and --wgmma-rows move the second and the third for a
// run.
struct Int4Limits {
  std::int64_t narrow_rows = 8;    // what int4_narrow can
  std::int64_t stream_rows = 256;  // of int4_stream, where the GPU has it
  std::int64_t mma_rows = 64;      // above those, of int4_mma; above, int4_wgmma where the GPU has it
  std::int64_t wgmma_rows = 1024;
  std::int64_t mma_rows_alone = 256;  // of int4_mma, where it has not
};

// Shared memory of int4_narrow's largest blocks.
inline constexpr int kInt4NarrowShared = 153600;

// By dtype, m, inner_k_tiles and what the GPU can.
inline Int4Path choose_int4(const Int4Gemm& p, const Int4Limits& limits = {}) {
  if (p.dtype != Scalar::kBFloat16 && p.dtype != Scalar::kFloat16) return Int4Path::kUnpack;
  if (p.m <= limits.narrow_rows && p.max_shared_bytes >= kInt4NarrowShared) return Int4Path::kNarrow;
  if (!p.has_wgmma || p.inner_k_tiles != 8) {
    return p.m <= limits.mma_rows_alone ? Int4Path::kMma : Int4Path::kUnpack;
  }
  if (p.m <= limits.stream_rows) return Int4Path::kStream;
  if (p.m <= limits.mma_rows) return Int4Path::kMma;
  return p.m <= limits.wgmma_rows ? Int4Path::kWgmma : Int4Path::kUnpack;
}

// Shared memory of int4_mma's blocks with so many rows.
inline constexpr int kInt4SharedOf64 = 106496, kInt4SharedOf128 = 129024;

// Shared memory that int4_stream's blocks have at most, and rows of one launch of it: with more, x does not stay in the
// second-level cache.
inline constexpr int kInt4SharedOfStream = 232448, kInt4StreamRows = 1024;

// Shared memory of int4_wgmma's largest blocks.
inline constexpr int kInt4SharedOfWgmma = 228352;

// Rows of a block's tile in int4_wgmma.
inline int int4_wgmma_rows(std::int64_t m) { return m <= 128 ? 128 : 256; }

// Rows of a block's tile in int4_mma.
inline int int4_tile_rows(std::int64_t m, int max_shared_bytes) {
  if (m <= 16) return 16;
  if (m <= 32 || max_shared_bytes < kInt4SharedOf64) return 32;
  return m <= 64 || max_shared_bytes < kInt4SharedOf128 ? 64 : 128;
}

}  // namespace untorch::kernels::cuda
