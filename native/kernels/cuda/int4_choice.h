// Which kernel serves a product with int4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/int4.h"

namespace untorch::kernels::cuda {

enum class Int4Path : std::int8_t { kNarrow, kMma, kUnpack, kStream };

// Read off benchmarks/gpu_int4.py on an H200, whose options move them for a run.
struct Int4Limits {
  std::int64_t narrow_rows = 16;      // what int4_narrow can
  std::int64_t stream_rows = 1024;    // of int4_stream, where the GPU has it
  std::int64_t mma_rows = 0;          // above those, of int4_mma
  std::int64_t mma_rows_alone = 256;  // of int4_mma, where the GPU has no int4_stream
};

// Shared memory of int4_narrow's blocks at most, with so many rows.
inline constexpr int kInt4NarrowShared = 153600, kInt4NarrowShared16 = 227328;
inline bool int4_narrow_can(const Int4Gemm& p) {
  return p.max_shared_bytes >= (p.m <= 8 ? kInt4NarrowShared : kInt4NarrowShared16) &&
         (p.m <= 8 || p.inner_k_tiles == 8);
}

// By dtype, m, inner_k_tiles and what the GPU can.
inline Int4Path choose_int4(const Int4Gemm& p, const Int4Limits& limits = {}) {
  if (p.dtype != Scalar::kBFloat16 && p.dtype != Scalar::kFloat16) return Int4Path::kUnpack;
  if (p.m <= limits.narrow_rows && int4_narrow_can(p)) return Int4Path::kNarrow;
  if (!p.has_wgmma || p.inner_k_tiles != 8) {
    return p.m <= limits.mma_rows_alone ? Int4Path::kMma : Int4Path::kUnpack;
  }
  if (p.m <= limits.stream_rows) return Int4Path::kStream;
  return p.m <= limits.mma_rows ? Int4Path::kMma : Int4Path::kUnpack;
}

// Shared memory of int4_mma's blocks with so many rows.
inline constexpr int kInt4SharedOf64 = 106496, kInt4SharedOf128 = 129024;

// Shared memory that int4_stream's blocks have at most, and rows of one launch of it: with more, x does not stay in the
// second-level cache.
inline constexpr int kInt4SharedOfStream = 232448, kInt4StreamRows = 1024;

// Rows of a block's tile in int4_mma.
inline int int4_tile_rows(std::int64_t m, int max_shared_bytes) {
  if (m <= 16) return 16;
  if (m <= 32 || max_shared_bytes < kInt4SharedOf64) return 32;
  return m <= 64 || max_shared_bytes < kInt4SharedOf128 ? 64 : 128;
}

}  // namespace untorch::kernels::cuda
