// NVFP4 operands of a W4A4 GEMM by cuBLASLt: E2M1 codes and E4M3 block scales of 16, for activations and weights.
//
//   codes    bytes [rows][k / 2], the even k in the lower half; k a multiple of 64
//   scales   unsigned E4M3 in tiles of 128 rows × 4 scales, 512 bytes, in row-major order of tiles; in a tile the scale
//            (r, c) is byte 16 · (r % 32) + 4 · (r / 32) + c. Rows are padded to a multiple of 128 with scales of 0.
#pragma once

#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/w4a16/nvfp4.h"

namespace untorch::kernels::cuda {

inline constexpr float kE2m1Max = 6.0f;
inline constexpr std::int64_t kNvfp4KMultiple = 64;       // of k
inline constexpr std::int64_t kNvfp4ScaleTileRows = 128;  // of scales

// The byte offset of the scale of a row's block of 16.
UNTORCH_ANYWHERE std::int64_t nvfp4_scale_offset(std::int64_t row, std::int64_t block, std::int64_t k) {
  const std::int64_t tile = row / 128 * (k / 64) + block / 4, r = row % 128;
  return tile * 512 + r % 32 * 16 + r / 32 * 4 + block % 4;
}

// E2M1, to nearest even; saturates at 6.
UNTORCH_ANYWHERE std::uint32_t e2m1_of(float value) {
  const float size = value < 0 ? -value : value;
  const std::uint32_t code = std::uint32_t{size > 0.25f} + std::uint32_t{size >= 0.75f} + std::uint32_t{size > 1.25f} +
                             std::uint32_t{size >= 1.75f} + std::uint32_t{size > 2.5f} + std::uint32_t{size >= 3.5f} +
                             std::uint32_t{size > 5.0f};
  return code | (value < 0 ? 8u : 0u);
}

// Of a non-negative E4M3.
UNTORCH_ANYWHERE float e4m3_value(std::uint32_t bits) {
  if (bits < 8) return static_cast<float>(bits) * 0x1p-9f;
  const std::uint32_t wide = (bits + (120u << 3)) << 20;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Quantizes 16 values: codes, the first in the lowest bits, and their block scale. inv_scale is 6 · 448 / the row's
// absmax; the block scale takes the block's absmax to 6, rounded to E4M3, but is not 0 where a value is not.
UNTORCH_ANYWHERE std::uint64_t quantize_nvfp4_block(const float (&values)[16], float inv_scale, std::uint32_t& scale) {
  float absmax = 0.0f;
  for (int i = 0; i < 16; ++i) {
    const float size = values[i] < 0 ? -values[i] : values[i];
    absmax = size > absmax ? size : absmax;
  }
  scale = e4m3_of(absmax * inv_scale / kE2m1Max);
  if (scale == 0 && absmax > 0) scale = 1;
  const float factor = scale == 0 ? 0.0f : inv_scale / e4m3_value(scale);
  std::uint64_t codes = 0;
  for (int i = 0; i < 16; ++i) codes |= std::uint64_t{e2m1_of(values[i] * factor)} << 4 * i;
  return codes;
}

// The 16 codes of a weight's scale block, from bytes or tiles.
UNTORCH_ANYWHERE std::uint64_t nvfp4_block_codes(const Nvfp4Gemm& p, std::int64_t column, std::int64_t block) {
  if (p.inner_k_tiles == 0) {
    return static_cast<const std::uint64_t*>(p.weight)[column * (p.k / 16) + block];
  }
  const std::int64_t inner = p.inner_k_tiles, outer = block / inner, word = block % inner / 2, half = block % 2;
  const std::int64_t lanes = (column / 8 * (p.k / 16 / inner) + outer) * 32 + column % 8 * 4;
  const auto* const words = static_cast<const std::uint32_t*>(p.weight);
  std::uint64_t codes = 0;
  for (int t = 0; t < 4; ++t) {
    // Nibbles q and q + 4 are k 8q + 2t and 8q + 2t + 1 of 32.
    const std::uint32_t of_lane = words[(lanes + t) * (inner / 2) + word] >> (8 * half);
    for (int q = 0; q < 2; ++q) {
      const std::uint32_t pair = (of_lane >> 4 * q & 15u) | (of_lane >> (16 + 4 * q) & 15u) << 4;
      codes |= std::uint64_t{pair} << (32 * q + 8 * t);
    }
  }
  return codes;
}

// Quantizes rows to NVFP4 with a float32 scale each, absmax / (6 · 448); the scale of a row with values that are not
// finite is NaN.
struct Nvfp4Rows {
  DType dtype = DType::kBFloat16;  // bfloat16, float16 or float32
  std::int64_t m = 0, width = 0;   // a multiple of 8
  const void* x = nullptr;         // 16-byte aligned
  std::int64_t row = 0;            // elements between rows, a multiple of 8
  std::int64_t k = 0;              // of the codes, a multiple of 64; zeros behind `width`
  void *codes = nullptr, *block_scales = nullptr;
  float* scales = nullptr;  // [m]
};
int quantize_rows_nvfp4(const Nvfp4Rows& rows, Stream stream);

// Repacks columns [n0, n0 + n) of the weight as such an operand, K = k, without the global scale. The sign of a
// negative block scale goes to its codes; a NaN stays.
int make_nvfp4_operand(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, std::int64_t k, void* codes,
                       void* block_scales, Stream stream);

// A reference GEMM of such operands, sums [m, n] in float32 with rows `sums_row` apart: slow, to test the rest on GPUs
// without FP4 tensor cores.
struct Nvfp4ReferenceGemm {
  std::int64_t m = 0, n = 0, k = 0;
  const void *a = nullptr, *a_scales = nullptr, *b = nullptr, *b_scales = nullptr;
  float* sums = nullptr;
  std::int64_t sums_row = 0;
};
int nvfp4_reference_gemm(const Nvfp4ReferenceGemm& p, Stream stream);

}  // namespace untorch::kernels::cuda
