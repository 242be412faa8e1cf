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
// Written as moves of halves, which ptxas makes part of the instructions that use them.
__device__ __forceinline__ ScalePair scale_pair(std::uint32_t scale_and_zero) {
  ScalePair out;
  asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\nmov.b32 %0, {low, low};\nmov.b32 %1, {high, high};}"
      : "=r"(out.scale), "=r"(out.zero)
      : "r"(scale_and_zero));
  return out;
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

// The same pairs as 16 + q, exact numbers of T, with neither scale nor zero: those are put in once for the sum over a
// group, by add_group. Half the work, and no rounding of the weights.
template <class T>
__device__ __forceinline__ void unpack_codes(std::uint32_t word, std::uint32_t (&pairs)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr std::uint32_t kBase = kHalf ? 0x4c004c00u : 0x41804180u;  // 16
  constexpr std::uint32_t kMask = kHalf ? 0x03c003c0u : 0x00780078u;  // where its fraction's units are
  constexpr int kUp = kHalf ? 6 : 3;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int up = kUp - 4 * p;
    pairs[p] = and_or(up >= 0 ? word << (up >= 0 ? up : 0) : word >> (up >= 0 ? 0 : -up), kMask, kBase);
  }
}

// What unpack_codes leaves out.
template <class T>
__device__ __forceinline__ GroupFactors group_factors(std::uint32_t scale_and_zero) {
  struct Two {
    T scale, zero;
  };
  Two two;
  memcpy(&two, &scale_and_zero, 4);
  const float scale = widen(two.scale);
  return {scale, fmaf(-24.0f, scale, widen(two.zero))};
}
}  // namespace untorch::kernels::cuda
