// Linear layers with 8-bit weights: out [m, n] = x [m, k] · weightᵀ + bias, the weight int8 or float8_e4m3fn [n, k],
// dense, with float32 scales: [n], or one for 128 × 128 weights.
//
// Small M is bound by memory: the weight is read once, and x keeps 16 bits. For large M rows of x are rounded to 8 bits
// with scales, W8A8. On sm_90 int8 for any M, and E4M3 up to kFp8GemmMaxM, is gemm_plan.h's GEMM; the GEMV here and
// cuBLASLt do the rest.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

inline constexpr std::int64_t kW8ScaleBlock = 128;
inline constexpr std::int64_t kW8GemvMaxM = 8;
inline constexpr std::int64_t kW8GemvMaxK = 1 << 30;

// x, bias, out and the GPU as in W4A16Gemm, but float32 is served as well; n and k are multiples of 16, x_stride and
// x_width of 8.
struct W8Gemm : W4A16Gemm {
  DType weight_dtype = DType::kInt8;  // or float8_e4m3fn
  const float* scales = nullptr;
  std::int64_t scales_row = 0;  // of blocks: elements between those of 128 outputs; 0: a scale an output
  bool one_scale = false;       // one scale for all outputs, and one for all rows (w8_gemm_sm90)
};

// Up to kW8GemvMaxM rows of x as sums of rows of 8 bits, for WGMMA: bytes of the weight's dtype [pieces · 8, k], piece
// after piece, zeros behind x, and scales [8].
//
//   int8   x = (256 · a + b) · scale, scale max|x| / 32512
//   E4M3   x = (a + b / 16 + c / 256) · scale, scale a power of two: 12 significant bits; errors up to 2^-25 of max|x|
//
// Values that are not finite make the scale NaN. Rows behind M are not written.
struct SplitRows {
  std::uint8_t* values = nullptr;
  float* scales = nullptr;
};
constexpr int w8_pieces(DType weight) { return weight == DType::kInt8 ? 2 : 3; }
inline constexpr float kPieceFactorInt8 = 256.0f, kPieceFactorFp8 = 16.0f;
int w8_split_x(const W8Gemm& p, const SplitRows& to, Stream stream);

// M up to kW8GemvMaxM, K up to kW8GemvMaxK. Deterministic: every sum has a fixed order. x keeps 16 bits of a row's
// largest value for int8, and is exact for FP8.
int w8_gemv(const W8Gemm& p, Stream stream);

// weight · scale of outputs [n0, n0 + n) as a dense [n, k] of p.dtype, for cuBLASLt.
int w8_dequantize(const W8Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream);

// Rows of x in 8 bits: [m, to_width], dense, zeros behind `width`, with scales, max|x| / 127 or / 448. Values that are
// not finite make the scale NaN.
struct W8Rows {
  DType dtype = DType::kBFloat16;  // float32, bfloat16 or float16
  std::int64_t m = 0, width = 0;   // width: a multiple of 8
  const void* x = nullptr;         // 16-byte aligned
  std::int64_t row = 0;            // elements between rows, a multiple of 8
  void* to = nullptr;              // 16-byte aligned
  std::int64_t to_width = 0;       // a multiple of 16
  float* scales = nullptr;
  std::int64_t scales_row = 0;  // of parts: elements between the scales of a part and those of the next
  bool pdl = false;
};
// Elements between the scales of a part of m rows and those of the next, as cuBLASLt and TMA read them.
constexpr std::int64_t w8_part_scales_row(std::int64_t m) { return (m + 3) / 4 * 4; }
// int8 from -127 to 127, a scale a row.
int quantize_rows_int8(const W8Rows& rows, Stream stream);
// float8_e4m3fn, a scale for each 128 of a row: [parts][scales_row], as cuBLASLt reads them.
int quantize_parts_fp8(const W8Rows& rows, Stream stream);

}  // namespace untorch::kernels::cuda
