// int8 and FP8 (E4M3) codes of a paged KV cache: vectors of codes to float32 and back. Included by *.isa.cpp files
// only.
//
// A row of a token and head is code · scale, with one scale in bfloat16. Dot products take the codes, and their sums
// the scale. A code costs two instructions a vector in int8 (extend, convert), four in FP8: its bits, moved, are those
// of a float16 over 256, and the conversion of float16 takes care of subnormals.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention/softmax.h"
#include "kernels/cpu/gemm/gemm_dot.h"
#include "kernels/cpu/gemm/half_vector.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

typedef std::int8_t Codes __attribute__((vector_size(kVectorBytes / 4)));
typedef std::int8_t LooseCodes __attribute__((vector_size(kVectorBytes / 4), aligned(1), may_alias));
typedef std::int16_t ShortLanes __attribute__((vector_size(kVectorBytes / 2)));
typedef std::int32_t IntLanes __attribute__((vector_size(kVectorBytes)));

// As many neighbours as a vector of float32 has lanes.
[[gnu::always_inline]] inline Codes load_codes(const std::int8_t* p) { return *reinterpret_cast<const LooseCodes*>(p); }

// `count` codes, fewer than a vector of float32 has lanes, and zeros behind.
struct CodesPart {
  std::int8_t codes[N] = {};
  CodesPart(const std::int8_t* p, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) codes[i] = p[i];
  }
};

inline V load_part(const float* p, std::int64_t count) {
  float values[N] = {};
  for (std::int64_t i = 0; i < count; ++i) values[i] = p[i];
  return load(values);
}

// load: elements over kUnit, which goes into their scale. kLargest: the largest code. encode: the low byte of each
// lane, rounded to nearest, ties to even, for |v| <= kLargest but for rounding.
struct Int8 {
  using type = std::int8_t;
  static constexpr float kUnit = 1.0f, kLargest = 127.0f;
  [[gnu::always_inline]] static V load(const std::int8_t* p) {
    // GCC makes a chain of unpacks of a conversion of vectors.
#if defined(__AVX512F__)
    return (V)_mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, (__m128i)load_codes(p)));
#elif defined(__AVX2__)
    return (V)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
    return __builtin_convertvector(__builtin_convertvector(load_codes(p), IntLanes), V);
#endif
  }
  static V part(const std::int8_t* p, std::int64_t count) { return load(CodesPart(p, count).codes); }
  [[gnu::always_inline]] static Words encode(V v) {
    constexpr float kMagic = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer
    return (Words)(v + kMagic);
  }
};

struct Fp8 {
  using type = std::int8_t;
  static constexpr float kLargest = 448.0f;
#if defined(__F16C__) || defined(__AVX512F__)
  static constexpr float kUnit = 256.0f;
  static constexpr short kNoSecondSign = static_cast<short>(0xbfff);
  [[gnu::always_inline]] static V load(const std::int8_t* p) {
    // The sign twice, then the exponent's bits above those of the mantissa.
#if defined(__AVX512F__)
    const auto halves = ((ShortLanes)_mm256_cvtepi8_epi16((__m128i)load_codes(p)) << 7) & kNoSecondSign;
    return (V)_mm512_maskz_cvtph_ps(0xffff, (__m256i)halves);
#else
    const __m128i codes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const auto halves = ((ShortLanes)_mm_cvtepi8_epi16(codes) << 7) & kNoSecondSign;
    return (V)_mm256_cvtph_ps((__m128i)halves);
#endif
  }
#else
  static constexpr float kUnit = 1.0f;
  [[gnu::always_inline]] static V load(const std::int8_t* p) {
    const Words bits = (Words) __builtin_convertvector(load_codes(p), IntLanes);
    const V magnitude = (V)((bits & 0x7fu) << 20) * 0x1p120f;  // the exponent's bias grows by 120
    return (V)((Words)magnitude | (bits & 0x80000000u));
  }
#endif
  static V part(const std::int8_t* p, std::int64_t count) { return load(CodesPart(p, count).codes); }
  [[gnu::always_inline]] static Words encode(V v) {
    const Words bits = (Words)v, magnitude = bits & 0x7fffffffu;
    const Words normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    const Words tiny = (Words)((V)magnitude + 16384.0f) - 0x46800000u;  // 16384 has units of 2^-9, E4M3's smallest
    return (magnitude < 0x3c800000u ? tiny : normal) | ((bits >> 24) & 0x80u);
  }
};

#if defined(__AVX512F__)
constexpr int kCodeDotRows = 4;
#else
constexpr int kCodeDotRows = 2;  // 16 registers
#endif

// Dot products of MR rows of float32 with four rows of codes, `sums` [MR][16], of which four are written.
template <class C, int MR>
[[gnu::noinline]] void code_dot_tile(std::int64_t k, const float* a, const std::int8_t* b, float* sums) {
  V acc[MR][4] = {};
  const auto step = [&](const auto& row, const auto& codes) __attribute__((always_inline)) {
    V y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) y[j] = codes(b + j * k);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const V x = row(a + i * k);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[i][j] += x * y[j];
    }
  };
  std::int64_t kk = 0;
  for (; kk + N <= k; kk += N) {
    step([&](const float* p) { return load(p + kk); }, [&](const std::int8_t* p) { return C::load(p + kk); });
  }
  if (kk < k) {
    step([&](const float* p) { return load_part(p + kk, k - kk); },
         [&](const std::int8_t* p) { return C::part(p + kk, k - kk); });
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
    float four[4];
    sum_lanes<float>(acc[i], four);
    for (int j = 0; j < 4; ++j) sums[i * P + j] = four[j];
  }
}
template <class C>
void code_dots(std::int64_t rows, std::int64_t k, const float* a, const std::int8_t* b, float* sums) {
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t step = rows - i >= kCodeDotRows ? kCodeDotRows : rows - i >= 2 ? 2 : 1;
    (step == kCodeDotRows ? code_dot_tile<C, kCodeDotRows>
     : step == 2          ? code_dot_tile<C, 2>
                          : code_dot_tile<C, 1>)(k, a + i * k, b, sums + i * P);
    i += step;
  }
}

// sums [MR][ld] of W vectors += weights [MR][ldw] · rows of elements [keys, width]; a single vector has `last` lanes.
template <class E, int MR, int W>
[[gnu::noinline]] void add_tile(std::int64_t keys, const float* weights, std::int64_t ldw, const typename E::type* rows,
                                std::int64_t width, std::int64_t last, float* sums, std::int64_t ld) {
  V acc[MR][W];
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) acc[i][j] = load(sums + i * ld + j * N);
  }
  for (std::int64_t x = 0; x < keys; ++x) {
    V y[W];
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) {
      const typename E::type* const at = rows + x * width + j * N;
      y[j] = W > 1 || last == N ? E::load(at) : E::part(at, last);
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const float weight = weights[i * ldw + x];
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) acc[i][j] += weight * y[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < W; ++j) store(sums + i * ld + j * N, acc[i][j]);
  }
}
template <class E, int MR>
void add_columns(std::int64_t keys, const float* weights, std::int64_t ldw, const typename E::type* rows,
                 std::int64_t width, float* sums, std::int64_t ld) {
  std::int64_t x = 0;
  for (; x + 4 * N <= width; x += 4 * N) add_tile<E, MR, 4>(keys, weights, ldw, rows + x, width, N, sums + x, ld);
  for (; x < width; x += N) {
    add_tile<E, MR, 1>(keys, weights, ldw, rows + x, width, smaller(N, width - x), sums + x, ld);
  }
}

// sums [count][ld] += weights [count][ldw] · rows of a page, whatever its elements are.
template <class E>
void add_rows(std::int64_t count, std::int64_t keys, const float* weights, std::int64_t ldw,
              const typename E::type* rows, std::int64_t width, float* sums, std::int64_t ld) {
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t step = count - i >= kCodeDotRows ? kCodeDotRows : count - i >= 2 ? 2 : 1;
    (step == kCodeDotRows ? add_columns<E, kCodeDotRows>
     : step == 2          ? add_columns<E, 2>
                          : add_columns<E, 1>)(keys, weights + i * ldw, ldw, rows, width, sums + i * ld, ld);
    i += step;
  }
}

// A row of float32 [padded to vectors, zeros behind `count`] to codes. Gives the scale's bits, bfloat16: the largest
// magnitude over kLargest, rounded up; NaN if the row has an infinity or NaN.
template <class C>
std::uint16_t quantize_row(const float* from, std::int64_t count, std::int8_t* to) {
  IntLanes top = {};
  for (std::int64_t x = 0; x < count; x += N) {
    const IntLanes magnitude = (IntLanes)load(from + x) & 0x7fffffff;  // ordered as the floats are, NaN above all
    top = magnitude > top ? magnitude : top;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < N; ++i) largest = top[i] > largest ? top[i] : largest;
  const bool finite = largest < 0x7f800000;
  float value = 0.0f;
  __builtin_memcpy(&value, &largest, sizeof value);
  value *= 1.0f / C::kLargest;
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof bits);
  bits = (bits + 0xffffu) & 0xffff0000u;
  float scale = 0.0f;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  const bool zero = !finite || bits == 0;
  for (std::int64_t x = 0; x < count; x += N) {
    const Codes codes = __builtin_convertvector(zero ? Words{} : C::encode(load(from + x) / scale), Codes);
    if (count - x >= N) {
      *reinterpret_cast<LooseCodes*>(to + x) = codes;
    } else {
      for (std::int64_t i = 0; i < count - x; ++i) to[x + i] = codes[i];
    }
  }
  return finite ? static_cast<std::uint16_t>(bits >> 16) : std::uint16_t{0x7fc0};
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
