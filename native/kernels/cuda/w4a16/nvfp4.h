// NVFP4 W4A16 GEMM: E2M1 weights with an E4M3 scale for each 16 k and a float32 global scale.
//
// w = e2m1 · block_scale · global_scale, the global scale for the whole weight or for each column. Codes are the
// nibbles of problem.h's layout, or bytes [n, k/2] with the even k in the lower half. The GEMV and the GEMMs dequantize
// to e2m1 · block_scale, which is exact in x's dtype, and apply the global scale to float32 accumulators.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// inner_k_tiles 0: bytes.
struct Nvfp4Gemm : W4A16Gemm {
  const void* block_scales = nullptr;    // float8_e4m3fn [n][k / 16]; 16-byte aligned; a NaN counts as 480
  const float* global_scales = nullptr;  // one, or [n]
  bool row_scales = false;               // [n]
};

// out = x · weightᵀ + bias with inner_k_tiles 8, for M up to 16.
int nvfp4_gemv(const Nvfp4Gemm& p, Stream stream);

// The same for any M, by mma.sync and cp.async.
std::size_t nvfp4_gemm_sm80_workspace(const Nvfp4Gemm& p);
int nvfp4_gemm_sm80(const Nvfp4Gemm& p, Stream stream);

// The same for any M, by WGMMA and TMA (sm_90a).
std::size_t nvfp4_gemm_sm90_workspace(const Nvfp4Gemm& p);
int nvfp4_gemm_sm90(const Nvfp4Gemm& p, Stream stream);

// Dequantizes columns [n0, n0 + n) of either layout to a dense matrix [n, k] of p.dtype, which may be float32 here;
// both are multiples of 8 for tiles. Code, block scale and global scale are multiplied and rounded to float32, then to
// p.dtype. Does not read x or write out.
int nvfp4_dequantize(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream);

// Dequantizes to float8_e4m3fn without the global scale: e2m1 · block_scale · 2^-kNvfp4Fp8Shift, rounded to nearest
// even. The largest weight, 6 · 448 / 8, is an E4M3 value.
inline constexpr int kNvfp4Fp8Shift = 3;
int nvfp4_dequantize_fp8(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream);

}  // namespace untorch::kernels::cuda
