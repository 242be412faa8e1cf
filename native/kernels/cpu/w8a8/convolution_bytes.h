// From a tile's int32 sums in registers to uint8, where no activation is left but a clamp. Included by *.isa.cpp files
// only.
#pragma once

#include <cstdint>

#include "kernels/cpu/w8a8/convolution_finish.h"

namespace untorch::kernels::UNTORCH_ISA {

// What finish_bytes() needs of a tile.
struct ByteTile {
  const float *factor, *bias;
  std::uint8_t* out;
  const std::uint8_t* residual;  // laid out like out, or null
  std::int64_t ldc;
  float high, residual_factor;
  std::int32_t zero, residual_zero;
};

// What all tiles of a call share.
inline ByteTile byte_tile(const Int8ConvolutionCall& call, const Finisher& finish) {
  const Int8Convolution& p = *call.problem;
  ByteTile t{};
  t.ldc = p.groups * p.out_channels, t.high = finish.high(), t.zero = p.output_scale.zero;
  t.residual_factor = finish.residual_factor(), t.residual_zero = p.residual_scale.zero;
  return t;
}

#if defined(UNTORCH_VNNI) && defined(__AVX512F__)
#define UNTORCH_FINISHES_IN_REGISTERS 1

// A tile's sums to bytes: what Finisher does without a lower clamp other than the byte's own. Packing saturates, and
// takes four vectors at a time.
template <bool kResidual, int MR, int W>
[[gnu::always_inline]] inline void finish_bytes(Ints (&acc)[MR][W], const ByteTile& t) {
  using V = Vector<float>;
  const V high = V{} + t.high, factor_of_residual = V{} + t.residual_factor;
  const Ints zero = Ints{} + t.zero, zero_of_residual = Ints{} + t.residual_zero;
#pragma GCC unroll 4
  for (int j = 0; j < W; ++j) {
    const V factor = load(t.factor + j * kByteLanes), bias = load(t.bias + j * kByteLanes);
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      V y = __builtin_convertvector(acc[i][j], V) * factor + bias;
      if constexpr (kResidual) {
        const std::uint8_t* const from = t.residual + i * t.ldc + j * kByteLanes;
        const Ints r = (Ints)_mm512_cvtepu8_epi32((__m128i) * reinterpret_cast<const LooseNarrow*>(from));
        y += __builtin_convertvector(r - zero_of_residual, V) * factor_of_residual;
      }
      y = high < y ? high : y;
      acc[i][j] = rounded(y) + zero;  // NaN and what is below int32 become its least value
    }
  }
  typedef std::uint8_t Half __attribute__((vector_size(32), aligned(1), may_alias));
  typedef std::uint8_t Whole __attribute__((vector_size(64), aligned(1), may_alias));
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto packed = [&](Ints a, Ints b, Ints c, Ints d) __attribute__((always_inline)) {
    const __m512i low = _mm512_packs_epi32((__m512i)a, (__m512i)b), up = _mm512_packs_epi32((__m512i)c, (__m512i)d);
    return _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_packus_epi16(low, up));
  };
  if constexpr (W == 4) {
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
      *reinterpret_cast<Whole*>(t.out + i * t.ldc) = (Whole)packed(acc[i][0], acc[i][1], acc[i][2], acc[i][3]);
    }
  } else if constexpr (W == 2) {
#pragma GCC unroll 12
    for (int i = 0; i < MR; i += 2) {
      const int next = i + 1 < MR ? i + 1 : i;
      const __m512i both = packed(acc[i][0], acc[i][1], acc[next][0], acc[next][1]);
      *reinterpret_cast<Half*>(t.out + i * t.ldc) = (Half)_mm512_castsi512_si256(both);
      if (next != i) *reinterpret_cast<Half*>(t.out + next * t.ldc) = (Half)_mm512_extracti64x4_epi64(both, 1);
    }
  } else {
#pragma GCC unroll 12
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < W; ++j) {
        const __m512i u = _mm512_max_epi32((__m512i)acc[i][j], _mm512_setzero_si512());
        *reinterpret_cast<LooseNarrow*>(t.out + i * t.ldc + j * kByteLanes) =
            (LooseNarrow)_mm512_maskz_cvtusepi32_epi8(0xffff, u);
      }
    }
  }
}
#endif

}  // namespace untorch::kernels::UNTORCH_ISA
