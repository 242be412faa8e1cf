// nvfp4_linear: its contract, and its implementation on CUDA (nvfp4_linear_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "kernels/nvfp4_prefill.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// x [m, x_width] · weightᵀ, a weight of n rows and K = k.
struct Nvfp4Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0;
  int inner_k_tiles = 0;    // of the tensor-core layout; 0: bytes, the even k in the lower half
  bool row_scales = false;  // a global scale for each row
  Dims out_sizes;
};

// out = x · weightᵀ + bias, by the algorithm that nvfp4_heuristic.h chooses; into `into`, or new memory where it is
// null.
TensorPtr nvfp4_linear_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight,
                            const Tensor& block_scale, const Tensor& global_scale, const Tensor* bias,
                            const Nvfp4Shape& shape, kernels::Nvfp4Prefill prefill, const Tensor* into = nullptr);
TensorPtr dequantize_nvfp4_cuda(const char* op, const OnDevice& on, const Tensor& weight, const Tensor& block_scale,
                                const Tensor& global_scale, const Nvfp4Shape& shape, DType dtype);

}  // namespace untorch::shims
