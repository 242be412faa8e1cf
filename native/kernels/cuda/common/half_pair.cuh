// Packed pairs of half types in a 32-bit register: half2 and bfloat162.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

template <class T>
using HalfPair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

template <class T>
__device__ __forceinline__ HalfPair<T> pair_of_bits(std::uint32_t bits) {
  HalfPair<T> out;
  memcpy(&out, &bits, 4);
  return out;
}
template <class Pair>
__device__ __forceinline__ std::uint32_t bits_of_pair(Pair pair) {
  static_assert(sizeof(Pair) == 4);
  std::uint32_t out;
  memcpy(&out, &pair, 4);
  return out;
}

// Two floats in one register, rounded to the half type; `low` in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack_halves(float low, float high) {
  std::uint32_t r;
  if constexpr (std::is_same_v<T, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

}  // namespace untorch::kernels::cuda
