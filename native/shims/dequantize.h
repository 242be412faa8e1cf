// Dequantizes packed weights to dense matrices on their GPU, for the loader.
//
// The matrix is [n, k] of `dtype`, float32, bfloat16 or float16, outside the memory pool; it is ready in the order of
// the device's current stream. Throws where the tensors are no such weight, and in a build without CUDA kernels; `what`
// names the caller in messages.
#pragma once

#include "tensor/tensor.h"

namespace untorch::shims {

TensorPtr dequantize_int4(const char* what, const Tensor& weight, const Tensor& scale_and_zero, std::int64_t group_size,
                          DType dtype);
TensorPtr dequantize_nvfp4(const char* what, const Tensor& weight, const Tensor& block_scale,
                           const Tensor& global_scale, DType dtype);

}  // namespace untorch::shims
