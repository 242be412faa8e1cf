// What products of 8-bit numbers need beside cuBLAS.
#pragma once

#include "kernels/launcher.h"

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
struct ScaledSums {
  std::int64_t m = 0, n = 0;
  const float* sums = nullptr;
  std::int64_t sums_row = 0;  // elements between rows
  const float *row = nullptr, *column = nullptr;
  bool one_column = false;     // column has one factor, for all
  const void* bias = nullptr;  // dense, of out's dtype, or null
  void* out = nullptr;
  DType dtype = DType::kFloat32;  // of out: float32, float16 or bfloat16
  std::int64_t out_row = 0;
};
int scale_rows_and_columns(const ScaledSums& p, Stream stream);

}  // namespace untorch::kernels::cuda
