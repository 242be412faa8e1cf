// Microkernels of the GEMM in bfloat16 and float16, sums in float32. Included by *.isa.cpp files only.
//
// B comes in panels of pairs, [panel][ceil(k/2)][16][2]: a 32-bit lane holds two neighbours along k of one column.
// Widening in registers takes a shift and a mask for bfloat16, a conversion for float16; AVX512_BF16 multiplies pairs
// as they are (vdpbf16ps: two multiply-adds a lane, subnormals are zero). A tile of C stays in registers for the whole
// block of k, so an element is one chain of sums in the order of k and neither the tile nor the threads change it.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/gemm/half_vector.h"

namespace untorch::kernels::UNTORCH_ISA {

// One tile of sums: C = A·B, or C += A·B.
struct PairTile {
  std::int64_t pairs;
  const void* a;     // float rows, or rows of bfloat16 for vdpbf16ps; 2·pairs elements each
  std::int64_t lda;  // elements
  const std::uint32_t* b;
  std::int64_t panel_step;  // of B, in pairs
  float* c;
  std::int64_t ldc;
  bool accumulate;
};

template <int MR, int W>
[[gnu::always_inline]] inline void store_sums(const PairTile& t, const Vector<float> (&acc)[MR][W]) {
  constexpr int N = kLanes<float>;
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      float* const to = t.c + i * t.ldc + j * N;
      store(to, t.accumulate ? load(to) + acc[i][j] : acc[i][j]);
    }
  }
}

template <HalfType H, int MR, int NV>
[[gnu::noinline]] void micro_widened(const PairTile& t) {
  constexpr int W = NV * kVectorsPerPanel, N = kLanes<float>;
  using V = Vector<float>;
  V acc[MR][W] = {};
  const auto* a = static_cast<const float*>(t.a);
  const std::uint32_t* b = t.b;
  const std::int64_t lda = t.lda, panel_step = t.panel_step;
  for (std::int64_t p = 0; p < t.pairs; ++p, b += kPackWidth, a += 2) {
    V even[W], odd[W];
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) {
      const std::uint32_t* const from = b + (j / kVectorsPerPanel) * panel_step + (j % kVectorsPerPanel) * N;
      widen_pairs<H>(load_words<V>(from), even[j], odd[j]);
    }
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) __builtin_prefetch(b + kPrefetchSteps * kPackWidth + v * panel_step);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      const V x = a[i * lda] - V{}, y = a[i * lda + 1] - V{};
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += x * even[j];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) acc[i][j] += y * odd[j];
    }
  }
  store_sums<MR, W>(t, acc);
}

#if defined(__AVX512F__)
#define UNTORCH_BF16 __attribute__((target("avx512bf16")))

template <int MR, int NV>
[[gnu::noinline]] UNTORCH_BF16 void micro_dot_bf16(const PairTile& t) {
  using V = Vector<float>;
  V acc[MR][NV] = {};
  const auto* a = static_cast<const std::uint16_t*>(t.a);
  const std::uint32_t* b = t.b;
  const std::int64_t lda = t.lda, panel_step = t.panel_step;
  for (std::int64_t p = 0; p < t.pairs; ++p, b += kPackWidth, a += 2) {
    __m512bh row[NV];
#pragma GCC unroll 16
    for (int j = 0; j < NV; ++j) row[j] = (__m512bh)_mm512_loadu_si512(b + j * panel_step);
#pragma GCC unroll 16
    for (int v = 0; v < NV; ++v) __builtin_prefetch(b + kPrefetchSteps * kPackWidth + v * panel_step);
#pragma GCC unroll 16
    for (int i = 0; i < MR; ++i) {
      int pair;
      std::memcpy(&pair, a + i * lda, sizeof pair);
      const auto x = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
      for (int j = 0; j < NV; ++j) acc[i][j] = (V)_mm512_dpbf16_ps((__m512)acc[i][j], x, row[j]);
    }
  }
  store_sums<MR, NV>(t, acc);
}
#endif

using PairKernel = void (*)(const PairTile&);

// By rows and panels, as MicroTable.
struct PairTable {
  PairKernel kernel[kMaxRows][kMaxPanels] = {};
};

template <class Make, int MR, int NV>
constexpr void add_pair(PairTable& table) {
  if constexpr (MR <= kMaxRows && NV <= max_panels(MR <= kMaxRows ? MR : 1))
    table.kernel[MR - 1][NV - 1] = Make::template kernel<MR, NV>();
}
template <class Make, int MR>
constexpr void add_pair_rows(PairTable& table) {
  add_pair<Make, MR, 1>(table), add_pair<Make, MR, 2>(table), add_pair<Make, MR, 3>(table);
  add_pair<Make, MR, 4>(table), add_pair<Make, MR, 8>(table);
}
template <class Make>
constexpr PairTable make_pair_table() {
  PairTable table;
  add_pair_rows<Make, 1>(table), add_pair_rows<Make, 2>(table), add_pair_rows<Make, 3>(table);
  add_pair_rows<Make, 4>(table), add_pair_rows<Make, 5>(table), add_pair_rows<Make, 6>(table);
  add_pair_rows<Make, 7>(table), add_pair_rows<Make, 8>(table), add_pair_rows<Make, 9>(table);
  add_pair_rows<Make, 10>(table), add_pair_rows<Make, 11>(table), add_pair_rows<Make, 12>(table);
  return table;
}

template <HalfType H>
struct MakeWidened {
  template <int MR, int NV>
  static constexpr PairKernel kernel() {
    return micro_widened<H, MR, NV>;
  }
};
template <HalfType H>
inline constexpr PairTable kWidened = make_pair_table<MakeWidened<H>>();

#if defined(__AVX512F__)
struct MakeDotBf16 {
  template <int MR, int NV>
  static constexpr PairKernel kernel() {
    return micro_dot_bf16<MR, NV>;
  }
};
inline constexpr PairTable kDotBf16 = make_pair_table<MakeDotBf16>();
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
