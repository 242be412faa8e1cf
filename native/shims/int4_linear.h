// int4_linear: its contract, what other operators with int4 weights share with it, and its implementation on CUDA
// (int4_linear_cuda.cpp).
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

// The names of a weight's arguments in an operator's schema.
struct Int4Names {
  const char *weight, *group, *scales;
};
// n, k, inner_k_tiles and the group size, from a weight [n/8][k/(16·t)][32][t/2] and its scales [k/group][n][2]; throws
// unless they are dense and of these shapes. The scales' dtype is not looked at.
Int4Shape check_int4_weight(const char* op, const Int4Names& names, const Tensor& weight, std::int64_t group,
                            const Tensor& scales);

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
