// Convolution of tensors on the CPU, for the plain shim and for the fused ones.
#pragma once

#include "shims/convolution.h"

namespace untorch::shims {

// input [n, c, spatial…], weight [out, c/groups, kernel…] or, transposed, [c, out/groups, kernel…]; bias may be null.
TensorPtr convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments);

}  // namespace untorch::shims
