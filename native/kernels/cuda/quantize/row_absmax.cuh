// The largest size in a row, found by a thread block, for rows that become narrow numbers with a scale.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kStep = 8;  // elements that are read at a time
// Where a reciprocal would be more than float32 holds, rows are so small that their last digits do not matter.
constexpr float kLeastSize = 0x1p-110f;

template <class T>
__device__ __forceinline__ void load_step(const T* from, float* values) {
  constexpr int kWords = kStep * static_cast<int>(sizeof(T)) / 16, kEach = kStep / kWords;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint4 word = reinterpret_cast<const uint4*>(from)[i];
    T each[kEach];
    memcpy(each, &word, 16);
#pragma unroll
    for (int j = 0; j < kEach; ++j) values[i * kEach + j] = widen(each[j]);
  }
}

// Of a row of `width` elements; all threads get it.
struct RowSize {
  bool finite;
  float size;  // kLeastSize at least; 1 where it is not finite
};
template <class T>
__device__ __forceinline__ RowSize row_size(const T* from, std::int64_t width) {
  // Bits of sizes are in the order of the sizes, and what is not finite comes last.
  std::uint32_t largest = 0;
  for (std::int64_t k = std::int64_t{threadIdx.x} * kStep; k < width; k += std::int64_t{kThreads} * kStep) {
    float values[kStep];
    load_step(from + k, values);
#pragma unroll
    for (int i = 0; i < kStep; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
  }
  __shared__ std::uint32_t warps[kThreads / 32];
  largest = __reduce_max_sync(0xffffffffu, largest);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) largest = max(largest, warps[i]);
  __syncthreads();  // before the next row's are written
  const bool finite = largest < 0x7f800000u;
  return {finite, fmaxf(finite ? __uint_as_float(largest) : 1.0f, kLeastSize)};
}

}  // namespace
}  // namespace untorch::kernels::cuda
