// Convolution of tensors on any device, for the plain C functions and for the fused ones.
#pragma once

#include "kernels/convolution.h"
#include "shims/op.h"

namespace untorch::shims {

struct ConvolutionArguments {
  DimSpan stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// input [n, c, spatial…], weight [out, c/groups, kernel…] or, transposed, [c, out/groups, kernel…]; bias may be null.
// Checks everything, on the operator's device.
TensorPtr convolution(const Op& op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments);

}  // namespace untorch::shims
