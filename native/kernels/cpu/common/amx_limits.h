// From where on AMX's tiles beat vectors, for those who choose kernels: plain constants, unlike amx.h.
#pragma once

#include <cstdint>

namespace untorch::kernels {

// The fewest rows of A: of bfloat16 and int8 GEMMs, of queries over pages, of output pixels of int8 convolutions.
// Attention without pages and bfloat16 convolutions take tiles for one row, too.
inline constexpr int kAmxFewestRows = 4, kAmxFewestPagedRows = 16, kAmxFewestInt8Pixels = 12;
// Of W4A8 linear layers, whose weights are dequantized first, and of experts in bfloat16, whose weights are packed
// first.
inline constexpr int kAmxFewestW4A8Rows = 32, kAmxFewestGroupedRows = 4;
// Bounds of a step along k, in words of 4 bytes.
inline constexpr int kAmxMostWords = 16, kAmxFewestWords = 2, kAmxFewestInt8Words = 4;
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
