// Products with int4 weights in the layout of problem.h.
//
// A weight is (q - 8)·scale + zero, in some kernels rounded once to x's dtype; in others sums of q·x over a group are
// scaled, so that an x which is not finite gives NaN where the weights' products would be infinite.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

struct Int4Gemm : W4A16Gemm {
  const void* scales = nullptr;  // of p.dtype, [k / group][n][2]: scale, zero; 16-byte aligned
  std::int64_t group = 32;
};

// out = x · weightᵀ + bias. For at most 16 rows, with inner_k_tiles 2 or 4 for at most 8.
int int4_gemv(const Int4Gemm& product, Stream stream);

// The same for any number of rows.
std::size_t int4_gemm_sm80_workspace(const Int4Gemm& product);
int int4_gemm_sm80(const Int4Gemm& product, Stream stream);

// The same with the tensor instructions of sm_90, for inner_k_tiles 8.
std::size_t int4_gemm_sm90_workspace(const Int4Gemm& product);
int int4_gemm_sm90(const Int4Gemm& product, Stream stream);

// Columns [first, first + columns), multiples of 8, of the weight as a dense matrix [columns, k] of p.dtype, which may
// be float32 here (the scales are too, then). x and out are not looked at.
int int4_dequantize(const Int4Gemm& p, std::int64_t first, std::int64_t columns, void* to, Stream stream);

}  // namespace untorch::kernels::cuda
