// From where on AMX's tiles beat vectors, for those who choose kernels: plain constants, unlike amx.h.
#pragma once

#include <cstdint>

namespace untorch::kernels {

// Rows of A: of bfloat16 and int8 GEMMs, queries of a head in attention, output pixels of convolutions.
inline constexpr int kAmxFewestRows = 8, kAmxFewestInt8Rows = 32, kAmxFewestQueries = 16, kAmxFewestPixels = 16;
// Words of 4 bytes of a step along k. With 4 in bfloat16 tiles have a quarter of their rate, four times that of
// float32; with 8 in int8 half, four times that of vpdpbusd.
inline constexpr int kAmxMostWords = 16, kAmxFewestWords = 4, kAmxFewestInt8Words = 8;
// Output pixels of a convolution that are computed at once, by two tiles, and those that share panels in L1.
inline constexpr int kAmxTilePixels = 32, kAmxBlockPixels = 256;
// A convolution computes at most so many pixels, some of them between the output's rows, for each that counts.
inline constexpr int kAmxMostWaste = 4;

// The longest step that divides a k of `words`.
constexpr int amx_step(std::int64_t words) noexcept {
  int step = kAmxMostWords;
  while (words % step != 0) --step;
  return step;
}

}  // namespace untorch::kernels
