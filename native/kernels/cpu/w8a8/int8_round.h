// Float32 to uint8 with a scale and a zero point, a vector at a time. Included by *.isa.cpp files only.
//
// Rounding is that of cvtps2dq (to nearest, ties to even) on x · (1 / scale), and the zero point is added as an
// integer, so that no level fuses the two: all give the same bytes.
#pragma once

#include <cstdint>

#include "kernels/cpu/w8a8/int8_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr int kByteLanes = kLanes<float>;
inline constexpr std::int32_t kInfinityBits = 0x7f800000;
inline constexpr float kLeastScale = 0x1p-126f;  // its reciprocal is finite

typedef std::uint8_t Narrow __attribute__((vector_size(kByteLanes)));
typedef std::uint8_t LooseNarrow __attribute__((vector_size(kByteLanes), aligned(1), may_alias));

[[gnu::always_inline]] inline Vector<float> larger(Vector<float> a, Vector<float> b) { return a > b ? a : b; }
[[gnu::always_inline]] inline Vector<float> smaller(Vector<float> a, Vector<float> b) { return a < b ? a : b; }

[[gnu::always_inline]] inline Ints rounded(Vector<float> x) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)x);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)x);
#elif defined(__x86_64__)
  return (Ints)_mm_cvtps_epi32((__m128)x);
#else
  Ints out;
  for (int i = 0; i < kByteLanes; ++i) out[i] = static_cast<std::int32_t>(__builtin_rintf(x[i]));
  return out;
#endif
}

// The bytes of steps that are between -2^30 and 2^30.
[[gnu::always_inline]] inline Narrow bytes_of(Vector<float> steps, std::int32_t zero) {
  Ints u = rounded(steps) + zero;
  u = u < 0 ? Ints{} : u;
#if defined(__AVX512F__)
  return (Narrow)_mm512_maskz_cvtusepi32_epi8(0xffff, (__m512i)u);
#else
  u = u > 255 ? Ints{} + 255 : u;
  return __builtin_convertvector(u, Narrow);
#endif
}

// The bytes of as many values as a vector has. Beyond 256 steps the byte is the same; the conversion to int32 is not
// defined everywhere.
[[gnu::always_inline]] inline Narrow quantized(Vector<float> x, float inverse, std::int32_t zero) {
  const Vector<float> most = Vector<float>{} + 256.0f;
  return bytes_of(larger(smaller(x * inverse, most), -most), zero);
}

}  // namespace untorch::kernels::UNTORCH_ISA
