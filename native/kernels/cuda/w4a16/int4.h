// Int4 W4A16 GEMM: weights in groups along K with a scale and a zero each, in the layout of problem.h.
//
// w = (q - 8) · scale + zero. The GEMMs dequantize to x's dtype, rounded once. The GEMV applies scale and zero to a
// group's float32 partial sums, so that an x which is not finite gives NaN where w · x would be infinite.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

struct Int4Gemm : W4A16Gemm {
  const void* scales = nullptr;  // of p.dtype, [k / group][n][2]: scale, zero; 16-byte aligned
  std::int64_t group = 32;
};

// out = x · weightᵀ + bias for M up to 16, with inner_k_tiles 2 or 4 up to 8.
int int4_gemv(const Int4Gemm& p, Stream stream);

// The same for any M, by mma.sync and cp.async.
std::size_t int4_gemm_sm80_workspace(const Int4Gemm& p);
int int4_gemm_sm80(const Int4Gemm& p, Stream stream);

// The same for any M, by WGMMA and TMA (sm_90a), for inner_k_tiles 8.
std::size_t int4_gemm_sm90_workspace(const Int4Gemm& p);
int int4_gemm_sm90(const Int4Gemm& p, Stream stream);

// Dequantizes columns [n0, n0 + n), multiples of 8, to a dense matrix [n, k] of p.dtype, which may be float32 here (the
// scales are, too, then). Does not read x or write out.
int int4_dequantize(const Int4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream);

}  // namespace untorch::kernels::cuda
