// int4_linear: its contract, what w4a8_linear shares with it, and its implementation on CUDA (int4_linear_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "kernels/cpu/w4a16/int4.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// x [m, x_width] · weightᵀ, a packed weight of n columns and K = k.
struct Int4Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0, group = 0;
  int inner_k_tiles = 8;
  Dims out_sizes;
};

kernels::ScaleType scale_type_of(DType dtype);

// In float32, dense; null for null.
TensorPtr float_bias(const Tensor* bias);

// out = x · weightᵀ + bias, by the algorithm that int4_heuristic.h chooses; into `into`, or new memory where it is
// null.
TensorPtr int4_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                           const Tensor& scales, const Tensor* bias, const Int4Shape& shape,
                           const Tensor* into = nullptr);
TensorPtr dequantize_int4_cuda(const char* op, const OnDevice& on, const Tensor& weight, const Tensor& scales,
                               const Int4Shape& shape, DType dtype);

}  // namespace untorch::shims
