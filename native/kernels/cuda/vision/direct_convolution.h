// Convolution straight from its definition, and the bias of a convolution.
#pragma once

#include "kernels/convolution_shape.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Strides in elements: batch, channel, then the three spatial dimensions.
struct ConvolutionStrides {
  std::int64_t at[5];
};

// output[n, o, …] = bias[o] + sum of input · weight over the input channels of o's group and the kernel. Any strides
// for input and weight (its dimensions as PyTorch orders them); output is dense, row-major or channels last as the
// shape says. bias may be null. Sums run in float for the half types, in the dtype itself otherwise; the order of the
// sum is fixed.
int convolution_direct(const ConvolutionShape& shape, bool transposed, DType dtype, const void* input,
                       const ConvolutionStrides& input_strides, const void* weight,
                       const ConvolutionStrides& weight_strides, const void* bias, void* output, Stream stream);

// output[n, o, …] += bias[o], output dense in the shape's format.
int convolution_bias(const ConvolutionShape& shape, DType dtype, const void* bias, void* output, Stream stream);

}  // namespace untorch::kernels::cuda
