// Depthwise convolution of channels-last images with the kernels that are compiled for their size.
#pragma once

#include "kernels/convolution.h"

namespace untorch::kernels::cuda {

struct DepthwiseOperands {
  const void *input, *weight, *bias, *residual;  // bias and residual may be null
  void* output;
};

// Whether channels and operands are multiples of `bytes`.
bool is_whole(const ConvolutionShape& shape, DType dtype, std::size_t bytes, const DepthwiseOperands& operands);

// Of problems that serves_depthwise says yes to. Channels and operands are multiples of 4 bytes.
bool has_depthwise_channels_last(const ConvolutionShape& shape);
int depthwise_channels_last(const ConvolutionShape& shape, DType dtype, const DepthwiseOperands& operands,
                            const ConvolutionEpilogue& epilogue, Stream stream);

}  // namespace untorch::kernels::cuda
