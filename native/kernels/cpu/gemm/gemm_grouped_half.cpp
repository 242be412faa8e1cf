// Grouped GEMM of bfloat16 and float16 by AVX-512: operands are read where they lie, without a packed or a float32 copy
// of the weights. bfloat16 is multiplied by AVX512_BF16 (vdpbf16ps), float16 by FMAs behind vcvtph2ps.
//
//   weights dense along k   tiles of 4 rows × 4 columns: 16 dot products along k, 8 loads a step
//   weights dense along n   tiles of 8 rows × 32 columns: 16 accumulators, elements of x broadcast
//
// Weights pass once for each block of rows that stays in L2; with few rows a group the kernel runs at the bandwidth of
// memory. An element is summed in one order of k, for every tile and number of threads.
//
// With AMX the dense GEMM multiplies bfloat16 groups of many rows: it packs their weights into panels of pairs of k.
#include "kernels/cpu/gemm/gemm_grouped_half.h"

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/half.h"
#include "kernels/cpu/common/amx_limits.h"
#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_operands.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace untorch::kernels::cpu {

#if defined(__x86_64__)

namespace {

#define UNTORCH_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,f16c,fma")))
#define UNTORCH_INLINE UNTORCH_AVX512 __attribute__((always_inline)) inline

constexpr std::int64_t kColumns = 32, kRowBytes = 192 * 1024;  // of an item; of the rows that pass together
constexpr std::int64_t kAmxColumns = 256;                      // of an item, for which rows are copied
constexpr std::int64_t kAmxFewestK = 32;                       // of a tile

template <class T>
inline constexpr bool kIsBf16 = std::is_same_v<T, BFloat16>;

bool has_instructions(DType dtype) noexcept {
  return dtype == DType::kBFloat16 ? cpu_has_bf16() : dtype == DType::kFloat16 && cpu_isa() == Isa::kV4;
}

// `count` (16 at most) results, rounded.
template <class T>
UNTORCH_INLINE void store(T* to, __m512 sums, std::int64_t count) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1);
  if constexpr (kIsBf16<T>) {
    _mm256_mask_storeu_epi16(to, mask, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(sums)));
  } else {
    _mm256_mask_storeu_epi16(to, mask,
                             _mm512_maskz_cvtps_ph(0xffff, sums, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

// Low and high pairs of each 128 bits, x's before y's, as unpcklps and unpckhps give them, and the same of 64-bit
// halves. GCC 12 takes the intrinsics' undefined operands for uninitialised variables.
UNTORCH_INLINE __m512 fold_floats(__m512 x, __m512 y) {
  return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
UNTORCH_INLINE __m512 fold_pairs(__m512 x, __m512 y) {
  return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// The sums of the lanes of four vectors.
UNTORCH_INLINE __m128 sum_lanes(const __m512 (&v)[4]) {
  const __m512 four = fold_pairs(fold_floats(v[0], v[1]), fold_floats(v[2], v[3]));
  const __m256 two = __builtin_shufflevector(four, four, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(four, four, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(two, two, 0, 1, 2, 3) + __builtin_shufflevector(two, two, 4, 5, 6, 7);
}

// What a step of a dot product takes: 32 bfloat16 as they are, or 16 float16 as float32.
template <class T>
constexpr std::int64_t kStep = kIsBf16<T> ? 32 : 16;

UNTORCH_INLINE __m512 to_float(__m256i halves) { return _mm512_maskz_cvtph_ps(0xffff, halves); }
UNTORCH_INLINE __m512bh load(const BFloat16* at, std::int64_t count) {
  const __mmask32 mask = count == 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
  return reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(mask, at));
}
UNTORCH_INLINE __m512 load(const Half* at, std::int64_t count) {
  return to_float(_mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << count) - 1), at));
}
UNTORCH_INLINE __m512 multiply_add(__m512 sum, __m512bh x, __m512bh y) { return _mm512_dpbf16_ps(sum, x, y); }
UNTORCH_INLINE __m512 multiply_add(__m512 sum, __m512 x, __m512 y) { return _mm512_fmadd_ps(x, y, sum); }

// Sizes and strides of a tile: b's rows are columns of the weight, or k.
struct Tile {
  std::int64_t k, a_row, b_row, columns, out_row;
};

// out[i][j], i < Rows, j < columns (4 at most) = dot products of rows of a and of b.
template <class T, int Rows>
UNTORCH_AVX512 void dot_tile(const Tile& t, const T* a, const T* b, T* out) {
  __m512 acc[Rows][4];
  const T* column[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    column[j] = b + std::min<std::int64_t>(j, t.columns - 1) * t.b_row;
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) acc[i][j] = _mm512_setzero_ps();
  }
  const auto step = [&](std::int64_t at, std::int64_t count) UNTORCH_AVX512 __attribute__((always_inline)) {
    decltype(load(a, count)) y[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) y[j] = load(column[j] + at, count);
#pragma GCC unroll 4
    for (int i = 0; i < Rows; ++i) {
      const auto x = load(a + i * t.a_row + at, count);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) acc[i][j] = multiply_add(acc[i][j], x, y[j]);
    }
  };
  std::int64_t at = 0;
  for (; at + kStep<T> <= t.k; at += kStep<T>) step(at, kStep<T>);
  if (at < t.k) step(at, t.k - at);
#pragma GCC unroll 4
  for (int i = 0; i < Rows; ++i) {
    const __m128 four = sum_lanes(acc[i]);
    const __m256 eight = __builtin_shufflevector(four, four, 0, 1, 2, 3, 0, 1, 2, 3);
    store(out + i * t.out_row, __builtin_shufflevector(eight, eight, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7),
          t.columns);
  }
}

// out[i][j], i < Rows, j < columns (32 at most): b's rows are k, dense along n.
template <class T, int Rows>
UNTORCH_AVX512 void broadcast_tile(const Tile& t, const T* a, const T* b, T* out) {
  __m512 acc[Rows][2];
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
  const __mmask32 mask = t.columns == 32 ? ~__mmask32{0} : (__mmask32{1} << t.columns) - 1;
  if constexpr (kIsBf16<T>) {
    // Pairs along k. Of 32 columns, acc[i][0] has the first four of each eight, acc[i][1] the others.
    const auto step = [&]<class Word>(std::int64_t k, __m512i second, Word) UNTORCH_AVX512
        __attribute__((always_inline)) {
      const __m512i first = _mm512_maskz_loadu_epi16(mask, b + k * t.b_row);
      const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(first, second));
      const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(first, second));
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        Word word;
        std::memcpy(&word, a + i * t.a_row + k, sizeof(Word));
        const auto x = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<std::int32_t>(word)));
        acc[i][0] = multiply_add(acc[i][0], x, low), acc[i][1] = multiply_add(acc[i][1], x, high);
      }
    };
    std::int64_t k = 0;
    for (; k + 2 <= t.k; k += 2) step(k, _mm512_maskz_loadu_epi16(mask, b + (k + 1) * t.b_row), std::uint32_t{});
    if (k < t.k) step(k, _mm512_setzero_si512(), std::uint16_t{});
#pragma GCC unroll 8
    for (int i = 0; i < Rows; ++i) {
      const __m512 x = acc[i][0], y = acc[i][1];
      acc[i][0] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
      acc[i][1] = __builtin_shufflevector(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  } else {
    const auto low_mask = static_cast<__mmask16>(mask), high_mask = static_cast<__mmask16>(mask >> 16);
    for (std::int64_t k = 0; k < t.k; ++k) {
      const T* const row = b + k * t.b_row;
      const __m512 low = to_float(_mm256_maskz_loadu_epi16(low_mask, row));
      const __m512 high = to_float(_mm256_maskz_loadu_epi16(high_mask, row + (high_mask != 0 ? 16 : 0)));
#pragma GCC unroll 8
      for (int i = 0; i < Rows; ++i) {
        std::uint16_t one;
        std::memcpy(&one, a + i * t.a_row + k, 2);
        const __m512 x = _mm512_set1_ps(_cvtsh_ss(one));
        acc[i][0] = multiply_add(acc[i][0], x, low), acc[i][1] = multiply_add(acc[i][1], x, high);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Rows; ++i) {
    store(out + i * t.out_row, acc[i][0], std::min<std::int64_t>(t.columns, 16));
    if (t.columns > 16) store(out + i * t.out_row + 16, acc[i][1], t.columns - 16);
  }
}

template <class T>
using TileFunction = void (*)(const Tile&, const T*, const T*, T*);
template <class T>
constexpr TileFunction<T> kDotTiles[] = {dot_tile<T, 1>, dot_tile<T, 2>, dot_tile<T, 3>, dot_tile<T, 4>};
template <class T>
constexpr TileFunction<T> kBroadcastTiles[] = {broadcast_tile<T, 1>, broadcast_tile<T, 2>, broadcast_tile<T, 3>,
                                               broadcast_tile<T, 4>, broadcast_tile<T, 5>, broadcast_tile<T, 6>,
                                               broadcast_tile<T, 7>, broadcast_tile<T, 8>};

// Rows [m0, m1) of a group times columns [n0, n1) of its weight.
template <class T>
void slice(const GroupedGemm& p, std::int64_t group, std::int64_t m0, std::int64_t m1, std::int64_t n0,
           std::int64_t n1) {
  const bool along_k = p.b_row == 1;
  const std::int64_t rows = along_k ? 4 : 8, columns = along_k ? 4 : 32;
  const TileFunction<T>* const tiles = along_k ? kDotTiles<T> : kBroadcastTiles<T>;
  const T *const a = static_cast<const T*>(p.a), *const b = static_cast<const T*>(p.b) + group * p.b_group;
  T* const out = static_cast<T*>(p.out);
  const std::int64_t block = std::max(kRowBytes / (p.k * 2) / rows * rows, rows);
  for (std::int64_t first = m0; first < m1; first += block) {
    const std::int64_t end = std::min(first + block, m1);
    for (std::int64_t n = n0; n < n1; n += columns) {
      const Tile tile{p.k, p.a_row, along_k ? p.b_col : p.b_row, std::min(n1 - n, columns), p.out_row};
      for (std::int64_t m = first; m < end; m += rows) {
        tiles[std::min(end - m, rows) - 1](tile, a + m * p.a_row, b + n * p.b_col, out + m * p.out_row + n);
      }
    }
  }
}

// The rows of a group.
struct Rows {
  std::int64_t first, end;
};
Rows rows_of(const GroupedGemm& p, std::int64_t group) {
  const auto* const ends = static_cast<const std::int32_t*>(p.ends);
  return {group == 0 ? 0 : ends[(group - 1) * p.ends_stride], ends[group * p.ends_stride]};
}

bool pays_threads(const GroupedGemm& p) { return p.m * p.n * p.k > 32768 && !omp_in_parallel(); }

template <class T>
void run(const GroupedGemm& p) {
  const std::int64_t parts = (p.n + kColumns - 1) / kColumns, items = p.groups * parts;
  // M differs by group.
#pragma omp parallel for schedule(dynamic, 4) if (pays_threads(p))
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int64_t group = i / parts, n0 = i % parts * kColumns;
    const auto [m0, m1] = rows_of(p, group);
    if (m0 < m1) slice<T>(p, group, m0, m1, n0, std::min(n0 + kColumns, p.n));
  }
}

// The groups of many rows by AMX; false if there is none, and nothing is computed.
bool run_amx(const GroupedGemm& p) {
  using Bits = std::uint16_t;
  const auto *const a = static_cast<const Bits*>(p.a), *const b = static_cast<const Bits*>(p.b);
  std::vector<HalfPlan> plans(static_cast<std::size_t>(p.groups));
  std::size_t workspace = 0;
  for (std::int64_t group = 0; group < p.groups; ++group) {
    const auto [m0, m1] = rows_of(p, group);
    if (m1 - m0 < kAmxFewestGroupedRows) continue;
    HalfPlan& plan = plans[static_cast<std::size_t>(group)];
    plan = UNTORCH_ISA_CALL(plan_half)(HalfType::kBFloat16, m1 - m0, std::min(p.n, kAmxColumns), p.k, {a, p.a_row, 1},
                                       {b, p.b_row, p.b_col}, false, false, true, false);
    workspace = std::max(workspace, (plan.workspace + 4095) / 4096 * 4096);
  }
  if (workspace == 0) return false;
  const int threads = pays_threads(p) ? omp_get_max_threads() : 1;
  auto* const memory = static_cast<char*>(gemm_scratch(workspace * static_cast<std::size_t>(threads)));
  const std::int64_t parts = (p.n + kAmxColumns - 1) / kAmxColumns, items = p.groups * parts;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (std::int64_t i = 0; i < items; ++i) {
    const std::int64_t group = i / parts, n0 = i % parts * kAmxColumns, n1 = std::min(n0 + kAmxColumns, p.n);
    const auto [m0, m1] = rows_of(p, group);
    const HalfPlan& plan = plans[static_cast<std::size_t>(group)];
    if (plan.amx) {
      const HalfResult result{
          static_cast<Bits*>(p.out) + m0 * p.out_row + n0, p.out_row, 1, 1.0f, 0.0f, nullptr, {}, nullptr, 0};
      UNTORCH_ISA_CALL(slice_half)
      (HalfType::kBFloat16, plan, m1 - m0, n1 - n0, p.k, {a + m0 * p.a_row, p.a_row, 1},
       {b + group * p.b_group + n0 * p.b_col, p.b_row, p.b_col}, result,
       memory + static_cast<std::size_t>(omp_get_thread_num()) * workspace);
    } else if (m0 < m1) {
      slice<BFloat16>(p, group, m0, m1, n0, n1);
    }
  }
  return true;
}

#undef UNTORCH_INLINE
#undef UNTORCH_AVX512

}  // namespace

bool has_grouped_half(const GroupedGemm& p) noexcept {
  return has_instructions(p.dtype) && !p.along_k && p.k > 0 && p.a_col == 1 && (p.b_row == 1 || p.b_col == 1) &&
         p.out_col == 1;
}

void grouped_half(const GroupedGemm& p) {
  if (p.dtype == DType::kBFloat16) {
    if (p.k < kAmxFewestK || !cpu_has_amx() || !run_amx(p)) run<BFloat16>(p);
  } else {
    run<Half>(p);
  }
}

#else

bool has_grouped_half(const GroupedGemm&) noexcept { return false; }
void grouped_half(const GroupedGemm&) {}

#endif

}  // namespace untorch::kernels::cpu
