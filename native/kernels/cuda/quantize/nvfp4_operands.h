// NVFP4 for both operands of a product, as cuBLASLt wants them: codes of four bits and scales of 16 of them each.
//
// Codes are bytes [rows][k / 2], the even k in the lower half, and k a multiple of 64. Scales are E4M3 without a sign,
// in tiles of 128 rows by 4 scales, 512 bytes each, one after the other along k and then down the rows; within a tile
// the scale (r, c) is byte 16 · (r % 32) + 4 · (r / 32) + c. Rows up to a multiple of 128 have scales of 0.
#pragma once

#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/w4a16/nvfp4.h"

namespace untorch::kernels::cuda {

inline constexpr float kE2m1Max = 6.0f;
inline constexpr std::int64_t kFloat4Step = 64;       // of k
inline constexpr std::int64_t kFloat4TileRows = 128;  // of scales

// Where the scale of a row's block of 16 lies, of rows of k values.
UNTORCH_ANYWHERE std::int64_t float4_scale_at(std::int64_t row, std::int64_t block, std::int64_t k) {
  const std::int64_t tile = row / 128 * (k / 64) + block / 4, r = row % 128;
  return tile * 512 + r % 32 * 16 + r / 32 * 4 + block % 4;
}

// To nearest, ties to the even mantissa; what is larger than 6 becomes 6.
UNTORCH_ANYWHERE std::uint32_t e2m1_of(float value) {
  const float size = value < 0 ? -value : value;
  const std::uint32_t code = std::uint32_t{size > 0.25f} + std::uint32_t{size >= 0.75f} + std::uint32_t{size > 1.25f} +
                             std::uint32_t{size >= 1.75f} + std::uint32_t{size > 2.5f} + std::uint32_t{size >= 3.5f} +
                             std::uint32_t{size > 5.0f};
  return code | (value < 0 ? 8u : 0u);
}

// E4M3 numbers that are not negative.
UNTORCH_ANYWHERE float e4m3_value(std::uint32_t bits) {
  if (bits < 8) return static_cast<float>(bits) * 0x1p-9f;
  const std::uint32_t wide = (bits + (120u << 3)) << 20;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Codes of 16 values, the first in the lowest bits, and their scale. Values are multiplied by `by`, 6 · 448 / the row's
// largest size; the scale makes the block's largest 6, rounded to E4M3, but is not 0 where a value is not.
UNTORCH_ANYWHERE std::uint64_t float4_block(const float (&values)[16], float by, std::uint32_t& scale) {
  float largest = 0.0f;
  for (int i = 0; i < 16; ++i) {
    const float size = values[i] < 0 ? -values[i] : values[i];
    largest = size > largest ? size : largest;
  }
  scale = e4m3_of(largest * by / kE2m1Max);
  if (scale == 0 && largest > 0) scale = 1;
  const float factor = scale == 0 ? 0.0f : by / e4m3_value(scale);
  std::uint64_t codes = 0;
  for (int i = 0; i < 16; ++i) codes |= std::uint64_t{e2m1_of(values[i] * factor)} << 4 * i;
  return codes;
}

// The codes of a weight's block of 16, from bytes or tiles.
UNTORCH_ANYWHERE std::uint64_t float4_codes(const Nvfp4Gemm& p, std::int64_t column, std::int64_t block) {
  if (p.inner_k_tiles == 0) {
    return static_cast<const std::uint64_t*>(p.weight)[column * (p.k / 16) + block];
  }
  const std::int64_t inner = p.inner_k_tiles, outer = block / inner, word = block % inner / 2, half = block % 2;
  const std::int64_t lanes = (column / 8 * (p.k / 16 / inner) + outer) * 32 + column % 8 * 4;
  const auto* const words = static_cast<const std::uint32_t*>(p.weight);
  std::uint64_t codes = 0;
  for (int t = 0; t < 4; ++t) {
    // The nibbles q and q + 4 are the k's 8 · q + 2 · t and the one after it, of 32.
    const std::uint32_t of_lane = words[(lanes + t) * (inner / 2) + word] >> (8 * half);
    for (int q = 0; q < 2; ++q) {
      const std::uint32_t pair = (of_lane >> 4 * q & 15u) | (of_lane >> (16 + 4 * q) & 15u) << 4;
      codes |= std::uint64_t{pair} << (32 * q + 8 * t);
    }
  }
  return codes;
}

// Rows in NVFP4 with a float32 scale each, their largest size / (6 · 448); the scale of a row with values that are not
// finite is NaN.
struct Float4Rows {
  DType dtype = DType::kBFloat16;  // bfloat16, float16 or float32
  std::int64_t m = 0, width = 0;   // a multiple of 8
  const void* x = nullptr;         // 16-byte aligned
  std::int64_t row = 0;            // elements between rows, a multiple of 8
  std::int64_t k = 0;              // of the codes, a multiple of 64; zeros behind `width`
  void *codes = nullptr, *block_scales = nullptr;
  float* scales = nullptr;  // [m]
};
int float4_rows(const Float4Rows& rows, Stream stream);

// Columns [first, first + columns) of the weight as such an operand, k values wide, without the global scale. A block
// scale that is negative turns the signs of its codes; one that is NaN stays that.
int nvfp4_to_float4(const Nvfp4Gemm& p, std::int64_t first, std::int64_t columns, std::int64_t k, void* codes,
                    void* block_scales, Stream stream);

// sums[m, n] of such operands, float32 with rows `sums_row` apart: what cuBLASLt computes on GPUs that can, slowly, to
// test the rest on others.
struct Float4Product {
  std::int64_t m = 0, n = 0, k = 0;
  const void *a = nullptr, *a_scales = nullptr, *b = nullptr, *b_scales = nullptr;
  float* sums = nullptr;
  std::int64_t sums_row = 0;
};
int float4_multiply(const Float4Product& product, Stream stream);

}  // namespace untorch::kernels::cuda
