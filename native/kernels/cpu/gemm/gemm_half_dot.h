// Dot products along k of bfloat16 and float16, for a B whose columns are contiguous (x·Wᵀ with W row-major).
// Included by *.isa.cpp files only.
//
// Nothing is packed: at small M the GEMM reads the weights once, at 2 bytes an element. bfloat16 is widened in pairs
// (both operands alike, so no lane moves) or multiplied by vdpbf16ps; float16 is converted. An element's lanes are
// summed in one order and then in one fixed tree.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_dot.h"
#include "kernels/cpu/gemm/half_vector.h"

namespace untorch::kernels::UNTORCH_ISA {

#if defined(__AVX512F__)
inline constexpr int kHalfDotRows = 4;
#else
inline constexpr int kHalfDotRows = 2;  // 16 registers
#endif
inline constexpr int kHalfStep = 2 * kLanes<float>;  // elements of k

// Sums of a tile of dot products: `sums` [rows][16], of which four are written.
struct HalfDots {
  std::int64_t k;
  const std::uint16_t* a;
  std::int64_t lda;
  const std::uint16_t* b;
  std::int64_t ldb;
  float* sums;
};

// kHalfStep neighbours as two vectors of float32, in an order that is the same for all.
template <HalfType H>
[[gnu::always_inline]] inline void load_step(const std::uint16_t* p, Vector<float>& x, Vector<float>& y) {
  if constexpr (H == HalfType::kBFloat16) {
    widen_pairs<H>(load_words<Vector<float>>(p), x, y);
  } else {
    x = load_half<H>(p), y = load_half<H>(p + kLanes<float>);
  }
}

template <int MR, int NR>
[[gnu::always_inline]] inline void store_dots(const HalfDots& t, const Vector<float> (&acc)[MR][NR]) {
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
    Vector<float> four[4] = {};
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) four[j] = acc[i][j];
    float sums[4];
    sum_lanes<float>(four, sums);
    for (int j = 0; j < 4; ++j) t.sums[i * kPackWidth + j] = sums[j];
  }
}

template <HalfType H, int MR, int NR>
[[gnu::noinline]] void dot_widened(const HalfDots& t) {
  using V = Vector<float>;
  V acc[MR][NR] = {};
  const auto step = [&](const std::uint16_t* a, std::int64_t lda, const std::uint16_t* b, std::int64_t ldb)
      __attribute__((always_inline)) {
    V y[NR], w[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) load_step<H>(b + j * ldb, y[j], w[j]);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      V x, v;
      load_step<H>(a + i * lda, x, v);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[i][j] += x * y[j];
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[i][j] += v * w[j];
    }
  };
  std::int64_t kk = 0;
  for (; kk + kHalfStep <= t.k; kk += kHalfStep) step(t.a + kk, t.lda, t.b + kk, t.ldb);
  if (kk < t.k) {
    std::uint16_t rows[MR * kHalfStep] = {}, cols[NR * kHalfStep] = {};
    for (std::int64_t x = kk; x < t.k; ++x) {
      for (int i = 0; i < MR; ++i) rows[i * kHalfStep + x - kk] = t.a[i * t.lda + x];
      for (int j = 0; j < NR; ++j) cols[j * kHalfStep + x - kk] = t.b[j * t.ldb + x];
    }
    step(rows, kHalfStep, cols, kHalfStep);
  }
  store_dots<MR, NR>(t, acc);
}

#if defined(__AVX512F__)
template <int MR, int NR>
[[gnu::noinline]] __attribute__((target("avx512bf16"))) void dot_bf16(const HalfDots& t) {
  using V = Vector<float>;
  V acc[MR][NR] = {};
  std::int64_t kk = 0;
  for (; kk < t.k; kk += kHalfStep) {
    const std::int64_t left = t.k - kk;
    const __mmask32 mask = left >= kHalfStep ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    __m512bh y[NR];
#pragma GCC unroll 4
    for (int j = 0; j < NR; ++j) y[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, t.b + j * t.ldb + kk);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const auto x = (__m512bh)_mm512_maskz_loadu_epi16(mask, t.a + i * t.lda + kk);
#pragma GCC unroll 4
      for (int j = 0; j < NR; ++j) acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], x, y[j]);
    }
  }
  store_dots<MR, NR>(t, acc);
}
#endif

using HalfDotKernel = void (*)(const HalfDots&);

template <HalfType H, int MR>
HalfDotKernel half_dot_kernel(std::int64_t cols, bool bf16) {
#if defined(__AVX512F__)
  if constexpr (H == HalfType::kBFloat16) {
    if (bf16) return cols >= 4 ? dot_bf16<MR, 4> : dot_bf16<MR, 1>;
  }
#endif
  (void)bf16;
  return cols >= 4 ? dot_widened<H, MR, 4> : dot_widened<H, MR, 1>;
}

}  // namespace untorch::kernels::UNTORCH_ISA
