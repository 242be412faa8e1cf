// Which kernel serves a product with int4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/int4.h"

namespace untorch::kernels::cuda {

enum class Int4Path : std::int8_t { kNarrow, kMma, kUnpack };

// Not measured yet: these come from the rooflines of the three kernels' files. benchmarks/gpu_int4.py is what they are
// to be read off; its --mma-rows moves the second one for a run.
struct Int4Limits {
  std::int64_t narrow_rows = 8;  // what int4_narrow can
  std::int64_t mma_rows = 256;   // above, arithmetic is what costs, and cuBLAS is the better at it
  // What is unpacked at a time: this part of the second-level cache, and columns enough for a product that fills the
  // GPU.
  int l2_parts = 2;
  std::int64_t chunk_columns = 1024;
};

// Shared memory of int4_narrow's largest blocks.
inline constexpr int kInt4NarrowShared = 153600;

inline Int4Path choose_int4(Scalar dtype, std::int64_t m, int max_shared_bytes, const Int4Limits& limits = {}) {
  if (dtype != Scalar::kBFloat16 && dtype != Scalar::kFloat16) return Int4Path::kUnpack;
  if (m <= limits.narrow_rows && max_shared_bytes >= kInt4NarrowShared) return Int4Path::kNarrow;
  return m <= limits.mma_rows ? Int4Path::kMma : Int4Path::kUnpack;
}

// Columns of a chunk that is unpacked and multiplied: all of them, or a multiple of 128.
inline std::int64_t int4_chunk(std::int64_t n, std::int64_t k, std::int64_t element_bytes, std::int64_t l2_bytes,
                               const Int4Limits& limits = {}) {
  const std::int64_t columns = l2_bytes / limits.l2_parts / (k * element_bytes) / 128 * 128;
  const std::int64_t least = columns < limits.chunk_columns ? limits.chunk_columns : columns;
  return least < n ? least : n;
}

// Shared memory of int4_mma's blocks with so many rows.
inline constexpr int kInt4SharedOf64 = 106496, kInt4SharedOf128 = 129024;

// Rows of a block's tile in int4_mma.
inline int int4_tile_rows(std::int64_t m, int max_shared_bytes) {
  if (m <= 16) return 16;
  if (m <= 32 || max_shared_bytes < kInt4SharedOf64) return 32;
  return m <= 64 || max_shared_bytes < kInt4SharedOf128 ? 64 : 128;
}

}  // namespace untorch::kernels::cuda
