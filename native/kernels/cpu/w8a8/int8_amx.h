// The W8A8 GEMM's tile by AMX: the integers of vpdpbusd. Included by *.isa.cpp files of v4 only.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/w8a8/int8_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

// Sums of up to 32 rows and two panels, [32][32].
using AmxSums = std::int32_t[kAmxBlock][kAmxBlock];

// What is behind the last 64 of k, by vpdpbusd.
UNTORCH_VNNI inline void int8_rest(const Int8Tile& t, std::int64_t first, int rows, int panels, AmxSums& sums) {
  for (int i = 0; i < rows; ++i) {
    for (int p = 0; p < panels; ++p) {
      Ints sum{};
      for (std::int64_t g = first; g < t.groups; ++g) {
        const Ints a = Ints{} + static_cast<std::int32_t>(t.a[i * t.lda + g]);
        sum = UNTORCH_DPBUSD(sum, a, load_weights(t.b + p * t.panel_step + g * kPanelBytes));
      }
      *reinterpret_cast<LooseInts*>(&sums[i][p * kAmxRows]) = sum;
    }
  }
}

template <int MR, int NP>
void finish_amx(const Int8Tile& t, const std::int32_t (*from)[kAmxBlock]) {
  Ints sums[MR][NP];
  for (int i = 0; i < MR; ++i) {
    for (int p = 0; p < NP; ++p) sums[i][p] = load_ints(&from[i][p * kAmxRows]);
  }
  finish_sums<MR, NP>(t, sums);
}

// Rows of A behind the tile's, up to a multiple of 16, are read.
inline void int8_amx(const Int8Tile& given, int rows, int panels) {
  constexpr std::int64_t kStep = kAmxTileBytes / 4;  // words
  constexpr int kAtOnce = 4;
  alignas(64) AmxSums sums;
  const std::int64_t steps = given.groups / kStep;
  const bool has_rest = steps * kStep < given.groups;
  if (has_rest) int8_rest(given, steps * kStep, rows, panels, sums);
  amx_gemm<AmxTiles, true>({.a = given.a,
                            .a_stride = given.lda * 4,
                            .b = given.b,
                            .panel_bytes = given.panel_step,
                            .c = sums,
                            .c_stride = sizeof sums[0],
                            .steps = steps,
                            .start = has_rest ? sums : nullptr,
                            .start_stride = sizeof sums[0]},
                           rows > kAmxRows ? 2 : 1, panels);
  Int8Tile t = given;
  for (int i = 0; i < rows;) {
    const int count = rows - i >= kAtOnce ? kAtOnce : 1;
    if (count == kAtOnce) {
      panels > 1 ? finish_amx<kAtOnce, 2>(t, sums + i) : finish_amx<kAtOnce, 1>(t, sums + i);
    } else {
      panels > 1 ? finish_amx<1, 2>(t, sums + i) : finish_amx<1, 1>(t, sums + i);
    }
    t.row_scale += count, t.row_zero += count, t.c += count * t.ldc;
    if (t.residual != nullptr) t.residual += count * t.ldr;
    i += count;
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
