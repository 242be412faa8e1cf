// bfloat16 and float16 to float32 vectors and back. Included by *.isa.cpp files only.
//
// The instructions of the level where it has them (F16C, AVX-512), integer arithmetic elsewhere. Results are rounded to
// nearest, ties to even; NaN stays NaN, subnormals stay what they are.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm/gemm_micro.h"

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace untorch::kernels::UNTORCH_ISA {

typedef std::uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t LooseWords __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
typedef std::uint16_t Halves __attribute__((vector_size(kVectorBytes / 2)));
typedef std::uint16_t LooseHalves __attribute__((vector_size(kVectorBytes / 2), aligned(2), may_alias));

template <class V>
[[gnu::always_inline]] inline Words load_words(const void* p) {
  static_assert(sizeof(V) == sizeof(Words));
  return *static_cast<const LooseWords*>(p);
}

// A word of each lane whose upper half is zero, as float32.
template <HalfType H>
[[gnu::always_inline]] inline Vector<float> widen_low(Words low) {
  if constexpr (H == HalfType::kBFloat16) {
    return (Vector<float>)(low << 16);
  } else {
    // The exponent's bias grows by 112; 2^112 does it for normal and subnormal halves alike.
    const Words magnitude = (low & 0x7fffu) << 13;
    const Vector<float> scaled = (Vector<float>)magnitude * 0x1p112f;
    const Words special = (Words)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
    return (Vector<float>)((Words)scaled | special | ((low & 0x8000u) << 16));
  }
}

// Pairs in 32-bit lanes: the first (low) and the second of each.
template <HalfType H>
[[gnu::always_inline]] inline void widen_pairs(Words pairs, Vector<float>& first, Vector<float>& second) {
  if constexpr (H == HalfType::kBFloat16) {
    first = (Vector<float>)(pairs << 16);
    second = (Vector<float>)(pairs & 0xffff0000u);
  } else {
#if defined(__AVX512F__)
    first = (Vector<float>)_mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)pairs));
    second = (Vector<float>)_mm512_maskz_cvtph_ps(0xffff, _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)(pairs >> 16)));
#elif defined(__F16C__)
    const __m256i both = _mm256_packus_epi32((__m256i)(pairs & 0xffffu), (__m256i)(pairs >> 16));
    const __m256i ordered = _mm256_permute4x64_epi64(both, 0xd8);
    first = (Vector<float>)_mm256_cvtph_ps(_mm256_castsi256_si128(ordered));
    second = (Vector<float>)_mm256_cvtph_ps(_mm256_extracti128_si256(ordered, 1));
#else
    first = widen_low<H>(pairs & 0xffffu);
    second = widen_low<H>(pairs >> 16);
#endif
  }
}

// As many neighbours in memory as float32 has lanes.
template <HalfType H>
[[gnu::always_inline]] inline Vector<float> load_half(const std::uint16_t* p) {
  const Halves halves = *reinterpret_cast<const LooseHalves*>(p);
#if defined(__AVX512F__)
  if constexpr (H == HalfType::kFloat16) return (Vector<float>)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#elif defined(__F16C__)
  if constexpr (H == HalfType::kFloat16) return (Vector<float>)_mm256_cvtph_ps((__m128i)halves);
#endif
#if defined(__AVX512F__)  // GCC makes two halves of the conversion
  return widen_low<H>((Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)halves));
#else
  return widen_low<H>(__builtin_convertvector(halves, Words));
#endif
}

template <HalfType H>
[[gnu::always_inline]] inline void store_half(std::uint16_t* p, Vector<float> v) {
  Halves halves;
  const Words bits = (Words)v, magnitude = bits & 0x7fffffffu;
  if constexpr (H == HalfType::kBFloat16) {
    const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const Words nan = (bits >> 16) | 0x40u;
    halves = __builtin_convertvector(magnitude > 0x7f800000u ? nan : rounded, Halves);
  } else {
#if defined(__AVX512F__)
    halves = (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    halves = (Halves)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    // Below 2^-14 adding 0.5 aligns the mantissa and rounds it; from 65520 on it is infinity.
    const Words tiny = (Words)((Vector<float>)magnitude + 0.5f) - 0x3f000000u;
    const Words normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    Words half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477ff000u ? Words{} + 0x7c00u : half;
    half = magnitude > 0x7f800000u ? Words{} + 0x7e00u : half;
    halves = __builtin_convertvector(half | ((bits >> 16) & 0x8000u), Halves);
#endif
  }
  *reinterpret_cast<LooseHalves*>(p) = halves;
}

// Two vectors, one behind the other.
template <HalfType H>
[[gnu::always_inline]] inline void store_two_halves(std::uint16_t* p, Vector<float> first, Vector<float> second) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  if constexpr (H == HalfType::kBFloat16) {
    const auto rounded = [](Vector<float> v) __attribute__((always_inline)) {
      const Words bits = (Words)v;
      const Words nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
      return (__m256i)(v != v ? (bits >> 16) | 0x40u : nearest);
    };
    const __m256i both = _mm256_packus_epi32(rounded(first), rounded(second));
    _mm256_storeu_si256(reinterpret_cast<__m256i_u*>(p), _mm256_permute4x64_epi64(both, 0xd8));
    return;
  }
#endif
  store_half<H>(p, first);
  store_half<H>(p + kLanes<float>, second);
}

// `count` neighbours, fewer than a vector has lanes; what is missing is 0.
template <HalfType H>
inline Vector<float> load_half_part(const std::uint16_t* p, std::int64_t count) {
  std::uint16_t part[kLanes<float>] = {};
  for (std::int64_t i = 0; i < count; ++i) part[i] = p[i];
  return load_half<H>(part);
}
template <HalfType H>
inline void store_half_part(std::uint16_t* p, Vector<float> v, std::int64_t count) {
  std::uint16_t part[kLanes<float>];
  store_half<H>(part, v);
  for (std::int64_t i = 0; i < count; ++i) p[i] = part[i];
}

}  // namespace untorch::kernels::UNTORCH_ISA
