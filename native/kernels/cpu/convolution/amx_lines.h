// What a slice of a convolution by AMX computes from: plain data, for *.isa.cpp files. amx_image.h draws the image.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/amx_limits.h"

namespace untorch::kernels {

// Output pixels in `count` lines, `step` pixels of the image from each to the next. A line has `rows` rows of `width`
// pixels that count, `pitch` apart, and is computed in tiles.
struct AmxLines {
  std::int64_t count, step, rows, pitch, width;

  // Pixels of a line, those between its rows, too.
  std::int64_t length() const noexcept { return (rows - 1) * pitch + width; }
  std::int64_t tiles() const noexcept { return (length() + kAmxTilePixels - 1) / kAmxTilePixels; }
};

struct AmxConvolution {
  AmxLines lines;
  const void* image;
  std::int64_t pixel;        // bytes from a pixel to the next
  const std::int64_t* taps;  // bytes from an output pixel's own to what each tap reads
  std::int64_t tap_count;
  std::int64_t words, group_step;  // of a group's channels in a pixel: words of 4 bytes; bytes from a group to the next
  const void* weight;              // [groups][panels][taps][words][16 words]
  std::int64_t panels;
};

// A slice: tiles of all lines, groups, and of each of these the panels.
struct AmxPart {
  std::int64_t tile0, tile1, group0, group1, panel0, panel1;
};

}  // namespace untorch::kernels
