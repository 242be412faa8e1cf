// What the kernels for products with few rows share: the tiles of a block, and the end of a product.
//
// A block has 8 warps. A tile of the result (up to 16 rows, `cols` columns) belongs to `split` of them, which take
// turns along k; so a block has 8 / split tiles. Their sums meet in shared memory and are added in a fixed order.
#pragma once

#include "kernels/cuda/device_types.cuh"
#include "kernels/cuda/gemm_small.h"

namespace untorch::kernels::cuda {

inline constexpr int kGemmWarps = 8;
inline constexpr int kGemmThreads = kGemmWarps * 32;
inline constexpr int kGemmRows = 16;  // of the result, a block

__device__ __forceinline__ float activated(float x, Activation activation) {
  if (activation == Activation::kRelu) return x < 0.0f ? 0.0f : x;  // keeps a NaN
  if (activation == Activation::kGelu) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  }
  return x;
}
__device__ __forceinline__ double activated(double x, Activation activation) {
  if (activation == Activation::kRelu) return x < 0.0 ? 0.0 : x;
  if (activation == Activation::kGelu) {
    return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
  }
  return x;
}

// sums: [warp][rows][cols], complete for the whole block. Every thread of the block calls it.
template <class T>
__device__ __forceinline__ void finish(const SmallGemm& p, const Compute<T>* sums, int rows, int cols, int split) {
  const int tiles = kGemmWarps / split, area = rows * cols;
  const std::int64_t first = std::int64_t{blockIdx.x} * tiles * cols, top = std::int64_t{blockIdx.y} * kGemmRows;
  const std::int64_t z = blockIdx.z;
  for (int i = static_cast<int>(threadIdx.x); i < tiles * area; i += kGemmThreads) {
    const int tile = i / area, within = i - tile * area, row = within / cols;
    const std::int64_t m = top + row, n = first + tile * cols + (within - row * cols);
    if (m >= p.m || n >= p.n) continue;
    Compute<T> sum = 0;
    for (int s = 0; s < split; ++s) sum += sums[(tile * split + s) * area + within];
    sum *= static_cast<Compute<T>>(p.alpha);
    if (p.c != nullptr) {
      sum += static_cast<Compute<T>>(p.beta) *
             widen(static_cast<const T*>(p.c)[z * p.c_batch + m * p.c_row + n * p.c_col]);
    }
    static_cast<T*>(p.out)[z * p.out_batch + m * p.out_row + n * p.out_col] = narrow<T>(activated(sum, p.activation));
  }
}

// Weights are read once: they must not push the rows of a, which every tile reads, out of the first-level cache.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ uint2 load_once_8(const void* address) {
  uint2 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address));
  return value;
}

// How many warps share a tile: enough of them to keep the memory busy (32 a multiprocessor), as long as each has a
// whole step of `chunk` along k to take.
inline int choose_split(const SmallGemm& p, int cols, int chunk) {
  const std::int64_t tiles = (p.n + cols - 1) / cols * ((p.m + kGemmRows - 1) / kGemmRows) * p.batch;
  const std::int64_t wanted = std::int64_t{p.multiprocessors} * 32;
  int split = 1;
  while (split < kGemmWarps && tiles * split < wanted && p.k > std::int64_t{split} * chunk) split *= 2;
  return split;
}

inline dim3 grid_of(const SmallGemm& p, int cols, int split) {
  const std::int64_t per_block = std::int64_t{kGemmWarps / split} * cols;
  return {static_cast<unsigned>((p.n + per_block - 1) / per_block),
          static_cast<unsigned>((p.m + kGemmRows - 1) / kGemmRows), static_cast<unsigned>(p.batch)};
}

// One a file, so that they compile side by side. b's columns (rows) are dense, see small_path.
int gemm_rows_half(const SmallGemm& product, Stream stream);
int gemm_columns_half(const SmallGemm& product, Stream stream);
int gemm_rows_float(const SmallGemm& product, Stream stream);
int gemm_columns_float(const SmallGemm& product, Stream stream);

}  // namespace untorch::kernels::cuda
