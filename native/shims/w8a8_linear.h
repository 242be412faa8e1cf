// w8a8_linear: its contract, and its implementation on CUDA (w8a8_linear_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "kernels/cuda/w8a8/w8a8.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// x [m, x_width] · weightᵀ, an 8-bit weight of n rows and K = k.
struct W8A8Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0;
  std::int64_t scales_row = 0;  // of blocks of 128 × 128: the scales of a row of blocks; 0: a scale an output
  Dims out_sizes;
};

// Whether w8_gemm_sm90 multiplies E4M3, where cuBLASLt could.
bool prefers_fp8_gemm_sm90(const kernels::cuda::W8Gemm& p);

// out = x · weightᵀ + bias; into `into`, or new memory where it is null.
TensorPtr w8a8_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                           const Tensor& scale, const Tensor* bias, const W8A8Shape& shape, const Tensor* into);

}  // namespace untorch::shims
