// Packed int4 weights as operands of the tensor cores.
#pragma once

#include "kernels/cuda/gemm_mma.cuh"
#include "kernels/cuda/int4.h"
#include "kernels/cuda/packed_weights.cuh"

namespace untorch::kernels::cuda {

// (value & mask) | bits.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t value, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(value), "r"(mask), "r"(bits));
  return out;
}

// A scale and a zero, each twice.
struct ScalePair {
  std::uint32_t scale, zero;
};
__device__ __forceinline__ ScalePair scale_pair(std::uint32_t scale_and_zero) {
  return {__byte_perm(scale_and_zero, 0, 0x1010), __byte_perm(scale_and_zero, 0, 0x3232)};
}

// (value - offset)·scale + zero for two numbers of T; value - offset is exact.
template <class T>
__device__ __forceinline__ std::uint32_t scaled(std::uint32_t value, std::uint32_t offset, ScalePair by) {
  using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const auto two = [](std::uint32_t bits) {
    Two out;
    memcpy(&out, &bits, 4);
    return out;
  };
  const Two sum = __hfma2(__hsub2(two(value), two(offset)), two(by.scale), two(by.zero));
  std::uint32_t out;
  memcpy(&out, &sum, 4);
  return out;
}

// The pairs of a word, k's 8·p + 2·t and the next. A nibble ored into the mantissa of 128 (1024 in float16), where the
// last bit is worth 1, is 128 + q.
template <class T>
__device__ __forceinline__ void unpack(std::uint32_t word, ScalePair by, std::uint32_t (&pairs)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr std::uint32_t kBase = kHalf ? 0x64006400u : 0x43004300u;    // 1024, 128
  constexpr std::uint32_t kOffset = kHalf ? 0x64086408u : 0x43084308u;  // 1032, 136
#pragma unroll
  for (int p = 0; p < 4; ++p) pairs[p] = scaled<T>(and_or(word >> (4 * p), 0x000f000fu, kBase), kOffset, by);
}

}  // namespace untorch::kernels::cuda
