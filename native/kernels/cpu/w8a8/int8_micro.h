// The W8A8 GEMM's register-blocked microkernels. Included by *.isa.cpp files only, once for each level.
//
//   S[MR, NP·16] = A[MR, k] · B[k, NP·16] in int32;  C = scale · (S - zero · column sums) + bias [+ residual, clamped]
//
// B comes in panels [k/4][16][4]: a vector is as many outputs as it has 32-bit lanes, with four weights of each. A is
// uint8, one word of four a step, broadcast.
//
// vpdpbusd (AVX512_VNNI, AVX-VNNI) multiplies uint8 by int8 and adds four products to each lane, without saturation.
// Without it, vpmaddubsw would saturate its sums of two products (255 · 127 · 2 exceeds int16). So bytes are widened to
// 16 bits, the even and the odd ones of each lane apart, and vpmaddwd multiplies them: exact, two instructions instead
// of one, and the weights are widened once for all rows of a tile. All levels give the same sums.
//
// 12 × 2 panels in AVX-512: 24 vpdpbusd for 14 loads a step of four k.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/w8a8/int8_levels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace untorch::kernels::UNTORCH_ISA {

typedef std::int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t LooseInts __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));
typedef std::int8_t LooseBytes __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));
typedef std::int16_t Shorts __attribute__((vector_size(kVectorBytes)));

#if defined(__AVX512F__)
inline constexpr int kVnniRows = 12, kMaddRows = 12, kMostSums = 24;
#elif defined(__AVX2__)
inline constexpr int kVnniRows = 6, kMaddRows = 4, kMostSums = 6;
#else
inline constexpr int kVnniRows = 0, kMaddRows = 2, kMostSums = 2;
#endif
inline constexpr int kMostPanels = 4;
// Rows, and bytes of them that L1 keeps while a panel passes, up to which panels are read one after the other, as they
// lie in memory: hardware follows within a page, and needs the first line of the next one alone. More rows share what
// is read of them among several panels.
inline constexpr int kFewRows = 4;
inline constexpr std::int64_t kFewRowBytes = 6000;

// A tile. Columns are whole panels.
struct Int8Tile {
  std::int64_t groups;  // of four k
  const std::uint32_t* a;
  std::int64_t lda;  // words
  const std::int8_t* b;
  std::int64_t panel_step;  // bytes
  const float* row_scale;
  const std::int32_t* row_zero;
  const float* scale;
  const std::int32_t* sums;
  const float* bias;
  float* c;
  std::int64_t ldc;
  const float* residual;  // or null
  std::int64_t ldr;
  float low, high;
};

[[gnu::always_inline]] inline Ints load_ints(const void* p) { return *static_cast<const LooseInts*>(p); }
[[gnu::always_inline]] inline Ints load_weights(const std::int8_t* p) {
  return (Ints) * reinterpret_cast<const LooseBytes*>(p);
}

// Sums of a tile to C.
template <int MR, int W>
[[gnu::always_inline]] inline void finish_sums(const Int8Tile& t, const Ints (&sums)[MR][W]) {
  using V = Vector<float>;
  constexpr int N = kLanes<float>;
  V acc[MR][W];
#pragma GCC unroll 16
  for (int j = 0; j < W; ++j) {
    const Ints columns = load_ints(t.sums + j * N);
    const V scale = load(t.scale + j * N), bias = load(t.bias + j * N);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const Ints exact = sums[i][j] - columns * t.row_zero[i];
      acc[i][j] = __builtin_convertvector(exact, V) * (scale * t.row_scale[i]) + bias;
    }
  }
  finish_tile<float, MR, W>(acc, t.residual, t.ldr, t.low, t.high);
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store(t.c + i * t.ldc + j * N, acc[i][j]);
  }
}

// Pairs of 16-bit integers: a0 · w0 + a1 · w1 in each lane.
[[gnu::always_inline]] inline Ints madd(Ints a, Ints w) {
#if defined(__AVX512F__)
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#elif defined(__AVX2__)
  return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#elif defined(__x86_64__)
  return (Ints)_mm_madd_epi16((__m128i)a, (__m128i)w);
#else
  return ((a << 16) >> 16) * ((w << 16) >> 16) + (a >> 16) * (w >> 16);
#endif
}

template <int MR, int NP>
[[gnu::noinline]] void int8_madd(const Int8Tile& t) {
  constexpr int W = NP * kVectorsPerPanel;
  Ints acc[MR][W] = {};
  const std::int8_t* b = t.b;
  for (std::int64_t g = 0; g < t.groups; ++g, b += kPanelBytes) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      const auto both =
          (Shorts)load_weights(b + j / kVectorsPerPanel * t.panel_step + j % kVectorsPerPanel * kVectorBytes);
      const auto even = (Ints)((both << 8) >> 8), odd = (Ints)(both >> 8);
#pragma GCC unroll 16
      for (int i = 0; i < MR; ++i) {
        const std::uint32_t* const a = t.a + i * t.lda + 2 * g;
        acc[i][j] += madd(Ints{} + static_cast<std::int32_t>(a[0]), even);
        acc[i][j] += madd(Ints{} + static_cast<std::int32_t>(a[1]), odd);
      }
    }
  }
  finish_sums<MR, W>(t, acc);
}

#if defined(__AVX512F__)
#define UNTORCH_VNNI __attribute__((target("avx512vnni")))
#define UNTORCH_DPBUSD(acc, a, w) (Ints) _mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(a), (__m512i)(w))
#elif defined(__AVX2__)
#define UNTORCH_VNNI __attribute__((target("avxvnni")))
#define UNTORCH_DPBUSD(acc, a, w) (Ints) _mm256_dpbusd_avx_epi32((__m256i)(acc), (__m256i)(a), (__m256i)(w))
#endif

#if defined(UNTORCH_VNNI)
template <int MR, int NP>
[[gnu::noinline]] UNTORCH_VNNI void int8_vnni(const Int8Tile& t) {
  constexpr int W = NP * kVectorsPerPanel;
  constexpr bool kFollowed = NP == 1 && MR <= kFewRows;
  constexpr std::int64_t kLinesOfPage = 64, kLinesAhead = kFollowed ? kLinesOfPage : 24;
  Ints acc[MR][W] = {};
  const std::int8_t* b = t.b;
  for (std::int64_t g = 0; g < t.groups; ++g, b += kPanelBytes) {
    Ints w[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      const std::int8_t* const from = b + j / kVectorsPerPanel * t.panel_step;
      if (j % kVectorsPerPanel == 0 && (!kFollowed || g % kLinesOfPage == 0)) {
        __builtin_prefetch(from + kLinesAhead * kPanelBytes, 0, 3);
      }
      w[j] = load_weights(from + j % kVectorsPerPanel * kVectorBytes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const Ints a = Ints{} + static_cast<std::int32_t>(t.a[i * t.lda + g]);
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] = UNTORCH_DPBUSD(acc[i][j], a, w[j]);
    }
  }
  finish_sums<MR, W>(t, acc);
}
#endif

using Int8Kernel = void (*)(const Int8Tile&);

// [rows - 1][0, 1, 2: 1, 2, 4 panels]; null where the sums do not fit the registers.
struct Int8Kernels {
  Int8Kernel kernel[12][3];
};

template <int MR, int NP>
constexpr Int8Kernel int8_kernel(bool vnni) {
  if constexpr (MR * NP <= kMostSums && NP <= kMostPanels) {
#if defined(UNTORCH_VNNI)
    if (vnni && MR <= kVnniRows) return int8_vnni < MR <= kVnniRows ? MR : 1, NP > ;
#endif
    if (!vnni && MR <= kMaddRows) return int8_madd < MR <= kMaddRows ? MR : 1, NP > ;
  }
  return nullptr;
}

template <int... Rows>
constexpr Int8Kernels make_int8_kernels(bool vnni) {
  return {{{int8_kernel<Rows, 1>(vnni), int8_kernel<Rows, 2>(vnni), int8_kernel<Rows, 4>(vnni)}...}};
}
inline constexpr Int8Kernels kInt8Madd = make_int8_kernels<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>(false);
inline constexpr Int8Kernels kInt8Vnni = make_int8_kernels<1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12>(true);

}  // namespace untorch::kernels::UNTORCH_ISA
