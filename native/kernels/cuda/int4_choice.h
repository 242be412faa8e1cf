// Which kernel serves a product with int4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/int4.h"
#include "kernels/cuda/packed_choice.h"

namespace untorch::kernels::cuda {

// kWhole: by cuBLASLt, from a weight that lies unpacked beside the packed one.
enum class Int4Path : std::int8_t { kNarrow, kMma, kUnpack, kStream, kWhole };

// Read off benchmarks/gpu_int4.py on an H200, whose options move them for a run.
struct Int4Limits {
  PackedNarrowLimit narrow;           // of int4_narrow
  PackedStreamLimit stream;           // of int4_stream, where the GPU has it
  std::int64_t tile_rows = 0;         // of its tiles: PackedGemm::tile_rows
  std::int64_t mma_rows = 0;          // above those, of int4_mma
  std::int64_t mma_rows_alone = 256;  // of int4_mma, where the GPU has no int4_stream
  PackedWholeLimit whole;
};

// Shared memory of int4_narrow's blocks at most, with so many rows.
inline constexpr int kInt4NarrowShared = 153600, kInt4NarrowShared16 = 227328;
inline bool int4_narrow_can(const Int4Gemm& p) {
  return p.max_shared_bytes >= (p.m <= 8 ? kInt4NarrowShared : kInt4NarrowShared16) &&
         (p.m <= 8 || p.inner_k_tiles == 8);
}

// By dtype, m, inner_k_tiles, what the GPU can, and whether the weight lies there unpacked, too.
inline Int4Path choose_int4(const Int4Gemm& p, const Int4Limits& limits = {}, bool has_whole = false) {
  const bool has_kernels = p.dtype == Scalar::kBFloat16 || p.dtype == Scalar::kFloat16;
  const bool has_stream = p.has_wgmma && p.inner_k_tiles == 8;
  if (has_whole && (!has_kernels || p.m > limits.whole.of(p, has_stream))) return Int4Path::kWhole;
  if (!has_kernels) return Int4Path::kUnpack;
  if (p.m <= limits.narrow.of(p, has_stream) && int4_narrow_can(p)) return Int4Path::kNarrow;
  if (!has_stream) {
    return p.m <= limits.mma_rows_alone ? Int4Path::kMma : Int4Path::kUnpack;
  }
  if (p.m <= limits.stream.of(p)) return Int4Path::kStream;
  return p.m <= limits.mma_rows ? Int4Path::kMma : Int4Path::kUnpack;
}

}  // namespace untorch::kernels::cuda
