// The W4A8 GEMM by AMX: its mainloop. Included by *.isa.cpp files of v4 only.
//
//   for rows in blocks that fit L2
//     for panels of 16 columns
//       for k in blocks of 1024            B: codes to bytes, once for all rows, 64 bytes a row, in L1
//         for tiles of 16 rows             A: quantized rows as they lie; sums in registers over the block
//           for parts of 32 k              tdpbssd of 16 x 16 x 32, its sums to memory, times the scales, in float32
//
// x has a scale for each part, so no int32 sum spans two of them: a step of k has 8 words of 4 bytes, in NVFP4, whose
// weights have a scale for 16 k, 4. While the vector units add the sums of a step, the tiles multiply the next one.
// int32 sums are exact and float32 adds in the order of w4a8.isa.cpp, so the results have the same bits.
//
// Roofline: of a step, tdpbssd takes 16 cycles, storing its sums 16, and a conversion, a multiplication and an FMA a
// row 24 on two ports; vpdpbusd takes 64 for its products, and those 24 behind them. Not measured yet.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/w4a8/w4a8_levels.h"
#include "kernels/cpu/w4a8/w4a8_weights.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr int kW4A8AmxBlockK = 1024;                    // a multiple of all groups
inline constexpr std::int64_t kW4A8AmxRowBytes = 1 << 20;      // of a block of rows
inline constexpr std::int64_t kW4A8AmxMostRows = 256;          // of it
inline constexpr int kW4A8Vectors = kAmxRows / kLanes<float>;  // of a panel

// Words of 4 bytes of a step of k.
constexpr int w4a8_step_words(W4A8Format format) {
  return static_cast<int>(format == W4A8Format::kNvfp4 ? kNvfp4Block : kW4A8Part) / 4;
}

struct W4A8AmxBuffers {
  alignas(64) std::int8_t weights[kW4A8AmxBlockK * kAmxRows];
  alignas(64) std::int32_t sums[2][kAmxRows][kAmxRows];
  alignas(64) float totals[kW4A8AmxMostRows][kAmxRows];
};

// `count` rows of 16 words to twice as many rows of B: int4 from 0 to 15, NVFP4 from -12 to 12.
template <Weights F>
void unpack_weights(const std::int32_t* words, std::int64_t count, std::int8_t* to) {
  const Ints halves = Ints{} + 0x0f0f0f0f;
  const auto put = [](Ints values, std::int8_t * at) __attribute__((always_inline)) {
    if constexpr (F == Weights::kNvfp4) {
      values = (Ints)((LooseBytes)shifted_values(values) - 12);
    }
    *reinterpret_cast<LooseInts*>(at) = values;
  };
  for (std::int64_t i = 0; i < count; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kW4A8Vectors; ++v) {
      const Ints word = load_ints(words + i * kAmxRows + v * kLanes<float>);
      std::int8_t* const at = to + 2 * i * kAmxTileBytes + v * kVectorBytes;
      put(word & halves, at);
      put((word >> 4) & halves, at + kAmxTileBytes);
    }
  }
}

// 16 rows and a panel, over a block of k. Pointers are those of the first row, and of the block's first k.
struct W4A8AmxTile {
  const W4A8Linear* p;
  const std::int8_t* values;
  std::int64_t stride;         // from a row of values to the next
  const float *scales, *sums;  // W4A8Rows
  const std::int8_t* weights;  // unpacked
  std::int64_t scale_at;       // in the weight's scales
  std::int64_t steps;          // of k
  float (*totals)[kAmxRows];
  bool accumulate;
};

// The sums of a step. Steps take turns with the registers.
template <class Tiles, int kTurn>
UNTORCH_AMX [[gnu::always_inline]] inline void sum_step(const std::int8_t* a, std::int64_t stride, const std::int8_t* b,
                                                        std::int32_t (&sums)[kAmxRows][kAmxRows]) {
  Tiles::template zero<kTurn>();
  Tiles::template load<4 + kTurn>(a, stride);
  Tiles::template load<6 + kTurn>(b, kAmxTileBytes);
  Tiles::template dot_s8s8<kTurn, 4 + kTurn, 6 + kTurn>();
  Tiles::template store<kTurn>(sums, sizeof sums[0]);
}

template <class Tiles, Weights F>
UNTORCH_AMX [[gnu::noinline]] void multiply_amx(const W4A8AmxTile& t, std::int32_t (&sums)[2][kAmxRows][kAmxRows]) {
  using V = Vector<float>;
  constexpr bool kNvfp4 = F == Weights::kNvfp4;
  constexpr int kStep = kNvfp4 ? kNvfp4Block : kW4A8Part, kStepsOfPart = kW4A8Part / kStep;
  const W4A8Linear& p = *t.p;
  const std::int64_t parts = p.k / kW4A8Part, groups = p.k / p.group, steps_of_group = p.group / kStep;
  V total[kAmxRows][kW4A8Vectors] = {};
  if (t.accumulate) {
#pragma GCC unroll 16
    for (int r = 0; r < kAmxRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kW4A8Vectors; ++v) total[r][v] = load(t.totals[r] + v * kLanes<float>);
    }
  }
  const std::int8_t *a = t.values, *b = t.weights;
  sum_step<Tiles, 0>(a, t.stride, b, sums[0]);
  std::int64_t step = 0;
  for (std::int64_t g = 0; step < t.steps; ++g) {
    V scale[kW4A8Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < kW4A8Vectors; ++v) {
      const std::int64_t within = v * kLanes<float>;
      if constexpr (kNvfp4) {
        scale[v] = load_block_scales(static_cast<const std::uint8_t*>(p.scales) + t.scale_at + g * 16 + within);
      } else {
        scale[v] = load_scales<F>(p.scales, t.scale_at + g * 32 + within);
        const V base = load_scales<F>(p.scales, t.scale_at + g * 32 + 16 + within) - 8.0f * scale[v];
#pragma GCC unroll 16
        for (int r = 0; r < kAmxRows; ++r) total[r][v] += base * t.sums[r * groups + g];
      }
    }
    for (const std::int64_t end = step + steps_of_group; step < end; ++step) {
      a += kStep, b += kStep * kAmxRows;
      if (step + 1 < t.steps) {
        step % 2 == 0 ? sum_step<Tiles, 1>(a, t.stride, b, sums[1]) : sum_step<Tiles, 0>(a, t.stride, b, sums[0]);
      }
      const std::int32_t(*const from)[kAmxRows] = sums[step % 2];
      const float* const row_scales = t.scales + step / kStepsOfPart;
#pragma GCC unroll 16
      for (int r = 0; r < kAmxRows; ++r) {
        const float row_scale = row_scales[r * parts];
#pragma GCC unroll 4
        for (int v = 0; v < kW4A8Vectors; ++v) {
          const V exact = __builtin_convertvector(load_ints(from[r] + v * kLanes<float>), V);
          total[r][v] += exact * (scale[v] * row_scale);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kAmxRows; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < kW4A8Vectors; ++v) store(t.totals[r] + v * kLanes<float>, total[r][v]);
  }
}

// All rows of the panels [panel, panel_end). The tiles are configured.
template <class Tiles, Weights F>
void w4a8_amx(const W4A8Linear& p, const W4A8Rows& rows, std::int64_t panel, std::int64_t panel_end) {
  constexpr int kPart = kW4A8Part, kStep = F == Weights::kNvfp4 ? kNvfp4Block : kPart;
  constexpr int kScales = F == Weights::kNvfp4 ? 16 : 32;  // of a panel and group
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group;
  const std::int64_t fitting = kW4A8AmxRowBytes / rows.stride / kAmxRows * kAmxRows;
  const std::int64_t most = fitting < kAmxRows ? kAmxRows : fitting < kW4A8AmxMostRows ? fitting : kW4A8AmxMostRows;
  W4A8AmxBuffers own;
  for (std::int64_t row = 0; row < p.m; row += most) {
    const std::int64_t count = p.m - row < most ? p.m - row : most;
    for (std::int64_t j = panel; j < panel_end; ++j) {
      for (std::int64_t k = 0; k < p.k; k += kW4A8AmxBlockK) {
        const std::int64_t length = p.k - k < kW4A8AmxBlockK ? p.k - k : kW4A8AmxBlockK;
        unpack_weights<F>(p.weight + (j * p.k + k) / 8 * 16, length / 8, own.weights);
        for (std::int64_t i = 0; i < count; i += kAmxRows) {
          const std::int64_t first = row + i;
          multiply_amx<Tiles, F>({.p = &p,
                                  .values = rows.values + first * rows.stride + k,
                                  .stride = rows.stride,
                                  .scales = rows.scales + first * parts + k / kPart,
                                  .sums = rows.sums + first * groups + k / p.group,
                                  .weights = own.weights,
                                  .scale_at = (j * groups + k / p.group) * kScales,
                                  .steps = length / kStep,
                                  .totals = own.totals + i,
                                  .accumulate = k > 0},
                                 own.sums);
        }
      }
      const std::int64_t left = p.n - j * kAmxRows;
      write_rows(p, own.totals[0], kAmxRows, row, static_cast<int>(count), j * kAmxRows,
                 left < kAmxRows ? left : kAmxRows);
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
