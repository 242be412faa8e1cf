// The W4A8 GEMM's weights, scales and epilogue, whichever instructions multiply. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/w4a8/w4a8.h"
#include "kernels/cpu/w8a8/int8_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr int kNvfp4Block = 16;  // of k, with one scale

// What the weights of a kernel are.
enum class Weights : std::uint8_t { kFloat32Scales, kBFloat16Scales, kFloat16Scales, kNvfp4 };

// Scales, with their zeros, of a panel and group.
template <Weights F>
[[gnu::always_inline]] inline std::int64_t scales_of_panel(const W4A8Linear& p) {
  return F == Weights::kNvfp4 || !p.has_zeros ? kW4A8Columns : 2 * kW4A8Columns;
}

// A vector of scales of int4 from `at` on.
template <Weights F>
[[gnu::always_inline]] inline Vector<float> load_scales(const void* scales, std::int64_t at) {
  if constexpr (F == Weights::kFloat32Scales) return load(static_cast<const float*>(scales) + at);
  constexpr HalfType kType = F == Weights::kBFloat16Scales ? HalfType::kBFloat16 : HalfType::kFloat16;
  return load_half<kType>(static_cast<const std::uint16_t*>(scales) + at);
}

// 2^8 times less than what the bytes, float8_e4m3fn, stand for: their bits are those of a float16 with one more of
// exponent.
[[gnu::always_inline]] inline Vector<float> load_block_scales(const std::uint8_t* from) {
#if defined(__AVX512F__)
  const __m256i wide = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 8);
  return (Vector<float>)_mm512_cvtph_ps(_mm256_and_si256(_mm256_srai_epi16(wide, 1), _mm256_set1_epi16(-0x4080)));
#elif defined(__AVX2__)
  const __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 8);
  return (Vector<float>)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(wide, 1), _mm_set1_epi16(-0x4080)));
#else
  Vector<float> out;
  for (int i = 0; i < kLanes<float>; ++i) {
    const int exponent = from[i] >> 3 & 15, mantissa = from[i] & 7;
    std::uint32_t bits = static_cast<std::uint32_t>((exponent + 112) << 23 | mantissa << 20);
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    if (exponent == 0) value = static_cast<float>(mantissa) * 0x1p-17f;
    out[i] = from[i] < 128 ? value : -value;
  }
  return out;
#endif
}
// What load_block_scales leaves out, and the half of 2·e2m1.
inline constexpr float kNvfp4Factor = 128.0f;

// The codes in the bytes, 0 to 15, to 12 + 2·e2m1.
[[gnu::always_inline]] inline Ints shifted_values(Ints codes) {
#if defined(__x86_64__)
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#if defined(__AVX512F__)
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)codes);
#elif defined(__AVX2__)
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)codes);
#else
  return (Ints)_mm_shuffle_epi8(table, (__m128i)codes);
#endif
#else
  constexpr std::uint8_t kValues[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
  std::uint8_t bytes[sizeof codes];
  __builtin_memcpy(bytes, &codes, sizeof codes);
  for (std::uint8_t& byte : bytes) byte = kValues[byte];
  __builtin_memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
}

// The columns of a tile that exist. add: to the sums of the k before. last: the sums get the scale of all of a column
// and the bias.
inline void write_rows(const W4A8Linear& p, const float* tile, std::int64_t ldo, std::int64_t row, int rows,
                       std::int64_t col, std::int64_t columns, bool add = false, bool last = true) {
  constexpr std::int64_t kWidth = kLanes<float>;
  const float* const scales = last && p.global_scales != nullptr ? p.global_scales + col : nullptr;
  const float* const bias = last && p.bias != nullptr ? p.bias + col : nullptr;
  for (int r = 0; r < rows; ++r) {
    float* const to = p.out + (row + r) * p.n + col;
    const float* const from = tile + r * ldo;
    const auto finished = [&](auto&& read) __attribute__((always_inline)) {
      auto sum = read(from);
      if (add) sum += read(to);
      if (scales != nullptr) sum *= read(scales) * kNvfp4Factor;
      if (bias != nullptr) sum += read(bias);
      return sum;
    };
    std::int64_t c = 0;
    for (; c + kWidth <= columns; c += kWidth) {
      store(to + c, finished([&](const float* at) __attribute__((always_inline)) { return load(at + c); }));
    }
    for (; c < columns; ++c) to[c] = finished([&](const float* at) { return at[c]; });
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
