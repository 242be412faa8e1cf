// The mainloop of convolutions by AMX, in bfloat16 and int8. Included by *.isa.cpp files only.
//
//   for pairs of panels             32 output channels
//     for blocks of k               their weights, 32 KiB, stay in L1; several taps, or a part of one
//       for tiles of 32 pixels      of one line; A's rows are pixels of the image, out of L2
//         four tiles of sums        the last block ends in the epilogue; others leave them in a buffer
//
// A step is four tile loads for four dot products of tiles, 16 cycles each. An image's pixels are no multiple of 512
// bytes apart, which would put a tile's rows into few sets of L1.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/convolution/amx_lines.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr std::int64_t kAmxPanelBytes = 16 << 10;  // of weights that stay in L1, for each of two panels
inline constexpr int kAmxBlockTiles = kAmxBlockPixels / kAmxTilePixels;
static_assert(kAmxTilePixels == kAmxBlock);

// A tile of pixels: those from `first` on are computed, the first ones of which another tile has already `skipped`.
struct AmxPlace {
  std::int64_t line, first;
  int rows, skipped;
};

// A line's last tile begins earlier where the line would end inside of it, so that nothing behind the line is read.
inline AmxPlace amx_place(const AmxLines& lines, std::int64_t tile) {
  const std::int64_t length = lines.length(), first = tile % lines.tiles() * kAmxBlock, left = length - first;
  const std::int64_t rows = left > kAmxRows ? kAmxBlock : kAmxRows;
  const std::int64_t back = left >= rows || length < rows ? 0 : rows - left;
  return {tile / lines.tiles(), first - back, static_cast<int>(left < rows ? left + back : rows),
          static_cast<int>(back)};
}

// Sums of a tile, [32][32], to finish(row of sums, output pixel, pixels) in runs of pixels of one output row.
template <class Sum, class Finish>
void finish_amx_tile(const AmxLines& lines, const AmxPlace& place, const Sum* sums, Finish&& finish) {
  for (std::int64_t i = place.skipped; i < place.rows;) {
    const std::int64_t row = (place.first + i) / lines.pitch, x = (place.first + i) % lines.pitch;
    const std::int64_t left = place.rows - i;
    if (x < lines.width) {
      const std::int64_t count = lines.width - x < left ? lines.width - x : left;
      finish(sums + i * kAmxBlock, (place.line * lines.rows + row) * lines.width + x, count);
    }
    i += lines.pitch - x < left ? lines.pitch - x : left;
  }
}

// start(group, panel, image of the line) are the sums' first values, a row for 2 panels, or null. finish(sums, pixel,
// pixels, group, panel, panels) takes rows of 32 sums. Tiles have been begun with amx_step(c.words).
template <class Tiles, bool kInt8, class Sum, class Start, class Finish>
void amx_slice(const AmxConvolution& c, const AmxPart& part, Start&& start, Finish&& finish) {
  const auto smaller = [](std::int64_t x, std::int64_t y) { return x < y ? x : y; };
  const auto ceil_div = [](std::int64_t x, std::int64_t y) { return (x + y - 1) / y; };
  alignas(64) Sum sums[kAmxBlockTiles][kAmxBlock * kAmxBlock];
  const int words = amx_step(c.words);
  const std::int64_t steps = c.words / words, panel_bytes = c.tap_count * c.words * kAmxTileBytes;
  const std::int64_t most = kAmxPanelBytes / (words * kAmxTileBytes);
  const std::int64_t taps = ceil_div(c.tap_count, ceil_div(c.tap_count, steps < most ? most / steps : 1));
  const std::int64_t piece = ceil_div(steps, ceil_div(steps, most));
  for (std::int64_t tile0 = part.tile0; tile0 < part.tile1; tile0 += kAmxBlockTiles) {
    const int tiles = static_cast<int>(smaller(kAmxBlockTiles, part.tile1 - tile0));
    AmxPlace places[kAmxBlockTiles];
    for (int i = 0; i < tiles; ++i) places[i] = amx_place(c.lines, tile0 + i);
    for (std::int64_t group = part.group0; group < part.group1; ++group) {
      for (std::int64_t panel = part.panel0; panel < part.panel1; panel += kAmxMostTiles) {
        const int panels = static_cast<int>(smaller(kAmxMostTiles, part.panel1 - panel));
        const char* weight = static_cast<const char*>(c.weight) + (group * c.panels + panel) * panel_bytes;
        for (std::int64_t tap = 0; tap < c.tap_count; tap += taps) {
          for (std::int64_t step = 0; step < steps; step += piece) {
            const bool first = tap == 0 && step == 0, last = tap + taps >= c.tap_count && step + piece >= steps;
            AmxOperands o{};
            o.a_stride = c.pixel, o.b = weight, o.panel_bytes = panel_bytes;
            o.c_stride = kAmxBlock * static_cast<std::int64_t>(sizeof(Sum));
            o.steps = smaller(piece, steps - step), o.words = words;
            o.runs = c.taps + tap, o.run_count = smaller(taps, c.tap_count - tap);
            for (int i = 0; i < tiles; ++i) {
              const AmxPlace& place = places[i];
              o.a = static_cast<const char*>(c.image) + (place.line * c.lines.step + place.first) * c.pixel +
                    group * c.group_step + step * words * 4;
              o.c = sums[first && last ? 0 : i];
              o.start = first ? start(group, panel, place.line) : o.c;
              o.start_stride = first ? 0 : o.c_stride;
              amx_gemm<Tiles, kInt8>(o, place.rows > kAmxRows ? 2 : 1, panels);
              if (!last) continue;
              finish_amx_tile(
                  c.lines, place, static_cast<const Sum*>(o.c),
                  [&](const Sum* rows, std::int64_t pixel, std::int64_t count)
                      __attribute__((always_inline)) { finish(rows, pixel, count, group, panel, panels); });
            }
            weight += o.run_count * o.steps * words * kAmxTileBytes;
          }
        }
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
