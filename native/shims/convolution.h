// Convolution of tensors on any device, for the plain C functions and for the fused ones.
#pragma once

#include <string_view>

#include "cuda/dnn.h"
#include "kernels/convolution.h"
#include "shims/op.h"

namespace untorch::shims {

struct ConvolutionArguments {
  DimSpan stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// What follows: activation(convolution + residual); the epilogue has no binary step.
struct ConvolutionTail {
  const Tensor* residual = nullptr;
  kernels::ConvolutionEpilogue epilogue;
  std::string_view plan = {};  // of cuDNN
};

// input [n, c, spatial…], weight [out, c/groups, kernel…] or, transposed, [c, out/groups, kernel…]; bias may be null.
// Checks everything, on the operator's device.
TensorPtr convolution(const Op& op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments);
// The same with a tail, and a result whose channels are innermost. On CUDA.
TensorPtr convolution_with_tail(const Op& op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                                const ConvolutionArguments& arguments, const ConvolutionTail& tail);

// Times cuDNN's algorithms for it, in memory of `out`.
cuda::DnnTuning tune_convolution(const Op& op, const Tensor& out, const Tensor& input, const Tensor& weight,
                                 const Tensor* bias, const ConvolutionArguments& arguments, const ConvolutionTail& tail,
                                 bool tf32);

}  // namespace untorch::shims
