// Which kernel serves a product with NVFP4 weights: the one place that says so.
#pragma once

#include "kernels/cuda/nvfp4.h"

namespace untorch::kernels::cuda {

enum class Nvfp4Path : std::int8_t { kNarrow, kMma, kStream, kUnpack };

// Read off benchmarks/gpu_nvfp4.py on an H200, whose options move them for a run.
struct Nvfp4Limits {
  std::int64_t narrow_rows = 16;      // what nvfp4_narrow can
  std::int64_t stream_rows = 512;     // of nvfp4_stream, where the GPU has it
  std::int64_t mma_rows = 0;          // above those, of nvfp4_mma
  std::int64_t mma_rows_alone = 256;  // of nvfp4_mma where the GPU has no nvfp4_stream
};

// Shared memory of nvfp4_narrow's blocks at most, with so many rows.
inline constexpr int kNvfp4NarrowShared = 159744, kNvfp4NarrowShared16 = 227328;
inline int nvfp4_narrow_shared(std::int64_t m) { return m <= 8 ? kNvfp4NarrowShared : kNvfp4NarrowShared16; }

// By dtype, m, layout and what the GPU can. Only tiles with inner_k_tiles 8 have kernels that multiply.
inline Nvfp4Path choose_nvfp4(const Nvfp4Gemm& p, const Nvfp4Limits& limits = {}) {
  if (p.dtype != Scalar::kBFloat16 && p.dtype != Scalar::kFloat16) return Nvfp4Path::kUnpack;
  if (p.inner_k_tiles != 8) return Nvfp4Path::kUnpack;
  if (p.m <= limits.narrow_rows && p.max_shared_bytes >= nvfp4_narrow_shared(p.m)) return Nvfp4Path::kNarrow;
  if (!p.has_wgmma) return p.m <= limits.mma_rows_alone ? Nvfp4Path::kMma : Nvfp4Path::kUnpack;
  if (p.m <= limits.stream_rows) return Nvfp4Path::kStream;
  return p.m <= limits.mma_rows ? Nvfp4Path::kMma : Nvfp4Path::kUnpack;
}

}  // namespace untorch::kernels::cuda
