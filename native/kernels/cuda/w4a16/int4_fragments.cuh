// Int4 to fragments: a word of eight codes to four pairs of float16 or bfloat16, in registers.
#pragma once

#include "kernels/cuda/common/half_pair.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/int4.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {

// (value & mask) | bits.
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t value, std::uint32_t mask, std::uint32_t bits) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(value), "r"(mask), "r"(bits));
  return out;
}

// a·b + c of a pair of T (fma.rn.f16x2 or bf16x2).
template <class T>
__device__ __forceinline__ std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return bits_of_pair(__hfma2(pair_of_bits<T>(a), pair_of_bits<T>(b), pair_of_bits<T>(c)));
}

// A scale and a zero, each broadcast to a pair, as dequantize_pairs takes them.
struct ScalePair {
  std::uint32_t scale, zero;
};
template <class T>
__device__ __forceinline__ ScalePair scale_pair(std::uint32_t scale_and_zero) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    // By 64 and 1.
    scale_and_zero = bits_of_pair(__hmul2(pair_of_bits<T>(scale_and_zero), pair_of_bits<T>(0x3f804280u)));
  }
  // Moves of halves, which ptxas makes part of the instructions that use them.
  ScalePair out;
  asm("{.reg .b16 low, high;\nmov.b32 {low, high}, %2;\nmov.b32 %0, {low, low};\nmov.b32 %1, {high, high};}"
      : "=r"(out.scale), "=r"(out.zero)
      : "r"(scale_and_zero));
  return out;
}

// Dequantizes a word: pair p has k 8·p + 2·t and the next, (q - 8)·scale + zero, rounded once.
//
// A nibble in bits 0 to 3 or 4 to 7 of a T whose other bits are constant is a + q·b for constants a and b, so that one
// shift serves four pairs, where moving each to bits 0 to 3 takes three. Shifts and lop3 have half the rate of fma. In
// float16 both places are in the mantissa of 1024. bfloat16 has seven mantissa bits, but the lowest exponent bit counts
// on from them while the others are 0: all eight bits are worth 2^-133 times their integer value. The first fma takes
// that to (q - 8) / 64, as 2^133 is out of range, and the scale is 64 times itself: one of 2^122 or more is infinite.
template <class T>
__device__ __forceinline__ void dequantize_pairs(std::uint32_t word, ScalePair scales, std::uint32_t (&pairs)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr std::uint32_t kLow = kHalf ? 0x3c003c00u : 0x7f007f00u, kHigh = kHalf ? 0x2c002c00u : 0x7d007d00u;
  constexpr std::uint32_t kAddLow = kHalf ? 0xe408e408u : 0xbe00be00u, kAddHigh = kHalf ? 0xd480d480u : 0xbe00be00u;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const std::uint32_t bits = p < 2 ? word : word >> 8, mask = p % 2 == 0 ? 0x000f000fu : 0x00f000f0u;
    const std::uint32_t raised = kHalf ? and_or(bits, mask, 0x64006400u) : bits & mask;
    const std::uint32_t value = multiply_add<T>(raised, p % 2 == 0 ? kLow : kHigh, p % 2 == 0 ? kAddLow : kAddHigh);
    pairs[p] = multiply_add<T>(value, scales.scale, scales.zero);
  }
}

// The same pairs as 16 + q, exact in T, without scale and zero: accumulate_group applies those once to a group's
// partial sums. Half the instructions, and no rounding of weights.
template <class T>
__device__ __forceinline__ void decode_pairs(std::uint32_t word, std::uint32_t (&pairs)[4]) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  constexpr std::uint32_t kBase = kHalf ? 0x4c004c00u : 0x41804180u;  // 16
  constexpr std::uint32_t kMask = kHalf ? 0x03c003c0u : 0x00780078u;  // where the mantissa's units are
  constexpr int kUp = kHalf ? 6 : 3;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const int up = kUp - 4 * p;
    pairs[p] = and_or(up >= 0 ? word << (up >= 0 ? up : 0) : word >> (up >= 0 ? 0 : -up), kMask, kBase);
  }
}

// What decode_pairs leaves to accumulate_group.
template <class T>
__device__ __forceinline__ GroupScale make_group_scale(std::uint32_t scale_and_zero) {
  struct Two {
    T scale, zero;
  };
  Two two;
  memcpy(&two, &scale_and_zero, 4);
  const float scale = widen(two.scale);
  return {scale, fmaf(-24.0f, scale, widen(two.zero))};
}

}  // namespace untorch::kernels::cuda
