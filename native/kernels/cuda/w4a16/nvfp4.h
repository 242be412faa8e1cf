// Products with NVFP4 weights.
//
// A weight is e2m1 · block_scale · global_scale: a code, a scale for each 16 k's of a column, and one for all or for
// each column. Codes are the nibbles of problem.h's layout, or bytes [n, k/2] with the even k in the lower half.
// Kernels that multiply have e2m1 · block_scale exactly and apply the global scale to float32 sums.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// inner_k_tiles 0: bytes.
struct Nvfp4Gemm : W4A16Gemm {
  const void* block_scales = nullptr;    // float8_e4m3fn [n][k / 16]; 16-byte aligned; a NaN counts as 480
  const float* global_scales = nullptr;  // one, or [n]
  bool row_scales = false;               // [n]
};

// out = x · weightᵀ + bias for inner_k_tiles 8. For at most 16 rows.
int nvfp4_gemv(const Nvfp4Gemm& product, Stream stream);

// The same for any number of rows.
std::size_t nvfp4_gemm_sm80_workspace(const Nvfp4Gemm& product);
int nvfp4_gemm_sm80(const Nvfp4Gemm& product, Stream stream);

// The same with the tensor instructions of sm_90, best for rows from 9 to some hundreds.
std::size_t nvfp4_gemm_sm90_workspace(const Nvfp4Gemm& product);
int nvfp4_gemm_sm90(const Nvfp4Gemm& product, Stream stream);

// Columns [first, first + columns) of the weight, in either layout, as a dense matrix [columns, k] of p.dtype, which
// may be float32 here; both are multiples of 8 for tiles. The product of the three is rounded to float32, then to
// p.dtype. x and out are not looked at.
int nvfp4_dequantize(const Nvfp4Gemm& p, std::int64_t first, std::int64_t columns, void* to, Stream stream);

// The same in float8_e4m3fn without the global scale: e2m1 · block_scale · 2^-kNvfp4Float8Shift, rounded to nearest,
// ties to even. What the largest weights are then, 6 · 448 / 8, is an E4M3 number.
inline constexpr int kNvfp4Float8Shift = 3;
int nvfp4_dequantize_fp8(const Nvfp4Gemm& p, std::int64_t first, std::int64_t columns, void* to, Stream stream);

}  // namespace untorch::kernels::cuda
