// Convolution of tensors, for the plain shim and for the fused ones.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

struct ConvolutionArguments {
  DimSpan stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// input [n, c, spatial…], weight [out, c/groups, kernel…] or, transposed, [c, out/groups, kernel…]; bias may be null.
TensorPtr convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments);

}  // namespace untorch::shims
