// The arguments of a convolution and what must hold for them, on any device.
#pragma once

#include <array>

#include "kernels/convolution_shape.h"
#include "shims/shim.h"

namespace untorch::shims {

struct ConvolutionArguments {
  DimSpan stride, padding, dilation, output_padding;
  bool transposed = false;
  std::int64_t groups = 1;
};

// Throws unless ranks, dtypes and channels agree: input [n, c, spatial…], weight [out, c/groups, kernel…] or,
// transposed, [c, out/groups, kernel…]; bias may be null.
void check_convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                       const ConvolutionArguments& arguments);
// The sizes of a problem that check_convolution let pass; channels_last is left false. Throws on bad lists, kernels
// larger than the padded input, and negative outputs.
kernels::ConvolutionShape convolution_shape(const char* op, const Tensor& input, const Tensor& weight,
                                            const ConvolutionArguments& arguments);
// The output padding of `n` spatial dimensions, at the end of three; zeros unless transposed.
std::array<std::int64_t, 3> output_padding_of(const char* op, const ConvolutionArguments& arguments, std::int64_t n);
Dims convolution_output_sizes(const Tensor& input, const kernels::ConvolutionShape& shape);

}  // namespace untorch::shims
