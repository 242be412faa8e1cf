// The W4A8 GEMM of many rows by AMX, in bfloat16: its mainloop. Included by *.isa.cpp files of v4 only.
//
//   for rows in blocks of 1024             A: rows of x, rounded to bfloat16, a block of k in L2
//     for k in blocks of 512
//       for pairs of panels of 16 columns  B: dequantized once for all rows, pairs of k, 64 bytes a row, in L1
//         for tiles of 32 rows             tdpbf16ps of 2 x 2 tiles, sums in tiles over the block of k
//
// x is not quantized here: with a scale for 32 k the int32 sums of each would leave the tiles for a conversion, a
// multiplication and an FMA, which cost as much as vpdpbusd. bfloat16 has the 8 bits of an int8 activation.
//
// A code becomes 32 + code (NVFP4: 32 + 12 + 2·e2m1) by its bits at the top of a mantissa, an FMA makes it the weight,
// and vcvtne2ps2bf16 rounds two vectors. The product of NVFP4's code and block scale has 6 bits, so these weights are
// exact; the global scale multiplies the sums.
//
// Roofline: 16 columns of two k take 10 vector instructions on two ports, 5 cycles; 16 rows of them in tdpbf16ps 1.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/w4a8/w4a8_levels.h"
#include "kernels/cpu/w4a8/w4a8_weights.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr std::int64_t kW4A8AmxBlockK = 512;  // a multiple of all groups
inline constexpr std::int64_t kW4A8AmxBlockRows = 1024;

struct W4A8AmxBuffers {
  alignas(64) std::uint32_t weights[kAmxMostTiles][kW4A8AmxBlockK / 2][kAmxRows];
  alignas(64) float sums[kAmxBlock][kAmxBlock];
};

// Two vectors, rounded to bfloat16, one behind the other.
[[gnu::always_inline]] inline Shorts to_bf16(Vector<float> first, Vector<float> second) {
  Shorts both;
#if defined(__AVX512F__)
  // By name: an intrinsic could not be inlined into code of the level.
  asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(first), "v"(second));
#else
  store_two_halves<HalfType::kBFloat16>(reinterpret_cast<std::uint16_t*>(&both), first, second);
#endif
  return both;
}

// Of columns at one k and at the next.
[[gnu::always_inline]] inline Shorts to_pairs(Vector<float> first, Vector<float> second) {
  const Shorts both = to_bf16(first, second);
#if defined(__AVX512F__)
  return __builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10,
                                 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
  Shorts pairs;
  for (int i = 0; i < kLanes<float>; ++i) pairs[2 * i] = both[i], pairs[2 * i + 1] = both[kLanes<float> + i];
  return pairs;
#endif
}

// A row of x to bfloat16, zeros behind `width`. What is not finite, or would not be, becomes NaN, as the whole row does
// when it is quantized.
inline void round_row(const float* x, std::int64_t width, std::int64_t k, std::uint16_t* to) {
  constexpr std::int64_t kAtOnce = 2 * kLanes<float>;
  const auto round = [](const float* from, std::uint16_t* at) {
    const auto finite = [](Vector<float> v) __attribute__((always_inline)) {
      const Words magnitude = (Words)v & 0x7fffffffu;
      return (Vector<float>)(magnitude > 0x7f7f7fffu ? Words{} + 0x7fc00000u : (Words)v);
    };
    const Shorts both = to_bf16(finite(load(from)), finite(load(from + kLanes<float>)));
    __builtin_memcpy(at, &both, sizeof both);
  };
  std::int64_t j = 0;
  for (; j + kAtOnce <= width; j += kAtOnce) round(x + j, to + j);
  for (; j < k; j += kAtOnce) {
    float part[kAtOnce] = {};
    for (std::int64_t i = j; i < width; ++i) part[i - j] = x[i];
    round(part, to + j);
  }
}

// k of a panel from `first` on, whole groups, to pairs [count / 2][16].
template <Weights F>
void dequantize_panel(const W4A8Linear& p, std::int64_t panel, std::int64_t first, std::int64_t count,
                      std::uint32_t (*to)[kAmxRows]) {
  using V = Vector<float>;
  constexpr bool kNvfp4 = F == Weights::kNvfp4;
  const std::int64_t per_group = scales_of_panel<F>(p);
  const std::int64_t group = kNvfp4 ? kNvfp4Block : p.group, at = panel * p.k + first;
  const std::int32_t* words = p.weight + at / 8 * kAmxRows;
  std::int64_t scale_at = at / group * per_group;
  const Ints halves = Ints{} + 0x0f0f0f0f;
  for (std::int64_t done = 0; done < count; done += group, scale_at += per_group) {
    V scale[kVectorsPerPanel], base[kVectorsPerPanel];
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsPerPanel; ++v) {
      const std::int64_t within = scale_at + v * kLanes<float>;
      V zero{};
      if constexpr (kNvfp4) {
        scale[v] = load_block_scales(static_cast<const std::uint8_t*>(p.scales) + within);
      } else {
        scale[v] = load_scales<F>(p.scales, within);
        if (p.has_zeros) zero = load_scales<F>(p.scales, within + kW4A8Columns);
      }
      base[v] = zero - scale[v] * (32.0f + (kNvfp4 ? 12.0f : 8.0f));
    }
    for (std::int64_t step = 0; step < group; step += 8, words += kAmxRows, to += 4) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsPerPanel; ++v) {
        const auto put = [&](Ints codes, int row) __attribute__((always_inline)) {
          if constexpr (kNvfp4) codes = shifted_values(codes);
          const auto weight = [&](Ints bits) __attribute__((always_inline)) {
            return scale[v] * (V)((bits & (31 << 18)) | 0x42000000) + base[v];
          };
          const Shorts pairs[] = {to_pairs(weight(codes << 18), weight(codes << 10)),
                                  to_pairs(weight(codes << 2), weight(codes >> 6))};
          __builtin_memcpy(to[row] + v * kLanes<float>, &pairs[0], sizeof pairs[0]);
          __builtin_memcpy(to[row + 1] + v * kLanes<float>, &pairs[1], sizeof pairs[1]);
        };
        const Ints word = load_ints(words + v * kLanes<float>);
        put(word & halves, 0);
        put((word >> 4) & halves, 2);
      }
    }
  }
}

// All rows of x, as round_row leaves them, and the panels [panel, panel_end). The tiles are configured.
template <class Tiles, Weights F>
void w4a8_amx(const W4A8Linear& p, const std::uint16_t* x, std::int64_t panel, std::int64_t panel_end) {
  constexpr std::int64_t kStep = kAmxTileBytes / 2;
  const auto smaller = [](std::int64_t a, std::int64_t b) { return a < b ? a : b; };
  const std::int64_t stride = w4a8_amx_stride(p.k);
  W4A8AmxBuffers own;
  for (std::int64_t first = 0; first < p.m; first += kW4A8AmxBlockRows) {
    const std::int64_t end = smaller(first + kW4A8AmxBlockRows, p.m);
    for (std::int64_t k = 0; k < p.k; k += kW4A8AmxBlockK) {
      const std::int64_t length = smaller(kW4A8AmxBlockK, p.k - k);
      for (std::int64_t j = panel; j < panel_end; j += kAmxMostTiles) {
        const int panels = panel_end - j > 1 ? 2 : 1;
        for (int i = 0; i < panels; ++i) dequantize_panel<F>(p, j + i, k, length, own.weights[i]);
        const std::int64_t col = j * kAmxRows, columns = smaller(panels * kAmxRows, p.n - col);
        for (std::int64_t row = first; row < end; row += kAmxBlock) {
          const int rows = static_cast<int>(smaller(kAmxBlock, end - row));
          amx_gemm<Tiles, false>({.a = x + row * stride + k,
                                  .a_stride = stride * 2,
                                  .b = own.weights,
                                  .panel_bytes = sizeof own.weights[0],
                                  .c = own.sums,
                                  .c_stride = sizeof own.sums[0],
                                  .steps = length / kStep},
                                 rows > kAmxRows ? 2 : 1, panels);
          write_rows(p, own.sums[0], kAmxBlock, row, rows, col, columns, k > 0, k + length == p.k);
        }
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
