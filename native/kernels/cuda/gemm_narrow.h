// What products of 8-bit numbers need beside cuBLAS.
#pragma once

#include "kernels/cuda/scalar.h"

namespace untorch::kernels::cuda {

// out[m, n] = sum over k of a[m, k] · b[k, n]: int8 into int32, which wraps around. Any strides (elements).
struct Int8Gemm {
  std::int64_t m = 0, n = 0, k = 0;
  const void* a = nullptr;
  std::int64_t a_row = 0, a_col = 0;
  const void* b = nullptr;
  std::int64_t b_row = 0, b_col = 0;
  void* out = nullptr;
  std::int64_t out_row = 0, out_col = 0;
};
int gemm_int8(const Int8Gemm& product, Stream stream);

// out[m, n] = sums[m, n] · row[m] · column[n] + bias[n]: the factors of a float8 product, one for each row and column.
// sums is float32 and dense; out is dense, float32, float16 or bfloat16; bias (dense, may be null) has out's dtype.
int scale_rows_and_columns(const float* sums, const float* row, const float* column, const void* bias, void* out,
                           Scalar dtype, std::int64_t m, std::int64_t n, Stream stream);

}  // namespace untorch::kernels::cuda
