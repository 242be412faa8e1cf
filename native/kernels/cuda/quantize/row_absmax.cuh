// The absolute maximum of a row, by a CTA, for dynamic per-row quantization.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kStep = 8;  // elements of a load
// The reciprocal of a smaller one would overflow float32.
constexpr float kMinAbsMax = 0x1p-110f;

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

// CTAs for each of `rows` rows of `width` elements: each finds the absmax and rounds a part.
inline unsigned parts_of_row(std::int64_t rows, std::int64_t width) {
  constexpr std::int64_t kMost = 8, kCtas = 512;
  const std::int64_t most = rows * kMost <= kCtas ? kMost : kCtas / rows;
  const std::int64_t parts = (width + kThreads * kStep - 1) / (kThreads * kStep);
  return static_cast<unsigned>(parts < most ? (parts < 1 ? 1 : parts) : most < 1 ? 1 : most);
}

// Of a row of `width` elements, for all threads.
struct RowAbsMax {
  bool finite;
  float absmax;  // at least kMinAbsMax; 1 where it is not finite
};
template <class T>
__device__ __forceinline__ RowAbsMax row_absmax(const T* from, std::int64_t width) {
  // Absolute values compare as their bits do, and what is not finite is largest.
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
  __syncthreads();  // before the next row overwrites `warps`
  const bool finite = largest < 0x7f800000u;
  return {finite, fmaxf(finite ? __uint_as_float(largest) : 1.0f, kMinAbsMax)};
}

}  // namespace
}  // namespace untorch::kernels::cuda
