// What the operators over a GEMM share: operands as matrices, their dtypes, and the GEMM itself on either device.
#pragma once

#include "kernels/gemm.h"
#include "shims/matmul_checks.h"
#include "shims/op.h"

namespace untorch::shims {

// The matrix of a 2-D tensor, or the batch of a 3-D one.
kernels::Matrix matrix_of(const Tensor& tensor);

// Throws kUnsupported for a dtype that the device has no GEMM for.
void check_gemm_dtype(const Op& op, DType dtype);

// out = alpha · a · b + beta · added, for 2-D tensors and, matrix by matrix, for 3-D ones, checked before. `added`,
// which may be null or `out`, broadcasts to out and is not read when beta is 0.
void gemm(const Op& op, const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* added = nullptr,
          double alpha = 1.0, double beta = 1.0);

bool is_float8(DType dtype) noexcept;

// _scaled_mm's operands, checked. bias and scale_result may be null; rowwise: scale_a is [m, 1] and scale_b is [1, n].
struct ScaledGemm {
  const Tensor *a, *b, *scale_a, *scale_b, *bias, *scale_result;
  DType out_dtype;
  bool fast_accumulation, rowwise;
};

}  // namespace untorch::shims
