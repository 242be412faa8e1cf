// int4_linear: its contract, and its implementation on CUDA (int4_linear_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// x [m, x_width] · weightᵀ, a packed weight of n columns and K = k.
struct Int4Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0, group = 0;
  int inner_k_tiles = 8;
  Dims out_sizes;
};

// out = x · weightᵀ + bias, by the algorithm that int4_heuristic.h chooses; into `into`, or new memory where it is
// null.
TensorPtr int4_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                           const Tensor& scales, const Tensor* bias, const Int4Shape& shape,
                           const Tensor* into = nullptr);
TensorPtr dequantize_int4_cuda(const char* op, const OnDevice& on, const Tensor& weight, const Tensor& scales,
                               const Int4Shape& shape, DType dtype);

}  // namespace untorch::shims
