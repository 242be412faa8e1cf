// Grouped GEMM of bfloat16 by AVX512_BF16 (vdpbf16ps): both operands are read where they lie, no packing, no float32
// copy of the weights.
//
// A tile of 4 × 4 sums keeps 16 accumulators for 8 loads of 32 k. Weights pass once for each block of rows that stays
// in L2; with few rows a group the kernel runs at the bandwidth of memory. An element is summed in the order of k, lane
// by lane, and then across the lanes in one fixed order, for every tile and number of threads.
#include "kernels/cpu/gemm/gemm_bf16_dot.h"

#include <omp.h>

#include <algorithm>
#include <cstdint>

#include "base/half.h"
#include "kernels/cpu/common/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace untorch::kernels::cpu {

#if defined(__x86_64__)

namespace {

#define UNTORCH_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

constexpr std::int64_t kColumns = 32, kRowBytes = 192 * 1024;  // of an item; of the rows that pass together

bool has_avx512_bf16() noexcept {
  static const bool has = cpu_isa() == Isa::kV4 && __builtin_cpu_supports("avx512bf16") != 0;
  return has;
}

UNTORCH_BF16 inline __m512bh load(const BFloat16* at, __mmask32 mask) {
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, at));
}

// Low and high pairs of each 128 bits, x's before y's, as unpcklps and unpckhps give them, and the same of 64-bit
// halves. GCC 12 takes the intrinsics' undefined operands for uninitialised variables.
UNTORCH_BF16 inline __m512 fold_floats(__m512 x, __m512 y) {
  return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
UNTORCH_BF16 inline __m512 fold_pairs(__m512 x, __m512 y) {
  return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// The sums of the lanes of four vectors.
UNTORCH_BF16 inline __m128 sum_lanes(const __m512 (&v)[4]) {
  const __m512 four = fold_pairs(fold_floats(v[0], v[1]), fold_floats(v[2], v[3]));
  const __m256 two = __builtin_shufflevector(four, four, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(four, four, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(two, two, 0, 1, 2, 3) + __builtin_shufflevector(two, two, 4, 5, 6, 7);
}

// out[i][j], i < Rows, j < columns (4 at most) = dot products of rows of a and of b, `k` long.
template <int Rows>
UNTORCH_BF16 void dot_tile(std::int64_t k, const BFloat16* a, std::int64_t a_row, const BFloat16* b, std::int64_t b_row,
                           std::int64_t columns, BFloat16* out, std::int64_t out_row) {
  __m512 acc[Rows][4];
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) acc[i][j] = _mm512_setzero_ps();
  }
  const BFloat16* column[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) column[j] = b + std::min<std::int64_t>(j, columns - 1) * b_row;
  const auto step = [&](std::int64_t at, __mmask32 mask) UNTORCH_BF16 __attribute__((always_inline)) {
    __m512bh y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) y[j] = load(column[j] + at, mask);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const __m512bh x = load(a + i * a_row + at, mask);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[i][j] = _mm512_dpbf16_ps(acc[i][j], x, y[j]);
    }
  };
  std::int64_t at = 0;
  for (; at + 32 <= k; at += 32) step(at, ~__mmask32{0});
  if (at < k) step(at, (__mmask32{1} << (k - at)) - 1);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    const __m128i four = reinterpret_cast<__m128i>(_mm_cvtneps_pbh(sum_lanes(acc[i])));
    _mm_mask_storeu_epi16(out + i * out_row, static_cast<__mmask8>((1u << columns) - 1), four);
  }
}

// Rows [m0, m1) of a group times columns [n0, n1) of its weight.
void slice(const GroupedGemm& p, std::int64_t group, std::int64_t m0, std::int64_t m1, std::int64_t n0,
           std::int64_t n1) {
  const auto* const a = static_cast<const BFloat16*>(p.a);
  const auto* const b = static_cast<const BFloat16*>(p.b) + group * p.b_group;
  auto* const out = static_cast<BFloat16*>(p.out);
  const std::int64_t block = std::max<std::int64_t>(kRowBytes / (p.k * 2) / 4 * 4, 4);
  for (std::int64_t first = m0; first < m1; first += block) {
    const std::int64_t end = std::min(first + block, m1);
    for (std::int64_t n = n0; n < n1; n += 4) {
      const std::int64_t columns = std::min<std::int64_t>(n1 - n, 4);
      for (std::int64_t m = first; m < end; m += 4) {
        const auto tile = [&](auto function) {
          function(p.k, a + m * p.a_row, p.a_row, b + n * p.b_col, p.b_col, columns, out + m * p.out_row + n,
                   p.out_row);
        };
        switch (std::min<std::int64_t>(end - m, 4)) {
          case 1:
            tile(dot_tile<1>);
            break;
          case 2:
            tile(dot_tile<2>);
            break;
          case 3:
            tile(dot_tile<3>);
            break;
          default:
            tile(dot_tile<4>);
        }
      }
    }
  }
}

}  // namespace

bool has_grouped_bf16_dot(const GroupedGemm& p) noexcept {
  return p.dtype == DType::kBFloat16 && !p.along_k && p.k > 0 && p.a_col == 1 && p.b_row == 1 && p.out_col == 1 &&
         has_avx512_bf16();
}

void grouped_bf16_dot(const GroupedGemm& p) {
  const auto* const ends = static_cast<const std::int32_t*>(p.ends);
  const std::int64_t parts = (p.n + kColumns - 1) / kColumns, items = p.groups * parts;
  const bool threads = p.m * p.n * p.k > 32768 && !omp_in_parallel();
  // Groups have different numbers of rows.
#pragma omp parallel for schedule(dynamic, 4) if (threads)
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int64_t group = i / parts, n0 = i % parts * kColumns;
    const std::int64_t m0 = group == 0 ? 0 : ends[(group - 1) * p.ends_stride], m1 = ends[group * p.ends_stride];
    if (m0 < m1) slice(p, group, m0, m1, n0, std::min(n0 + kColumns, p.n));
  }
}

#undef UNTORCH_BF16

#else

bool has_grouped_bf16_dot(const GroupedGemm&) noexcept { return false; }
void grouped_bf16_dot(const GroupedGemm&) {}

#endif

}  // namespace untorch::kernels::cpu
