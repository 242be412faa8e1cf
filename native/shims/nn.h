// Per-dimension argument lists and the channels-last memory format, for convolution and pooling.
#pragma once

#include <array>
#include <cstdint>

#include "shims/shim.h"

namespace untorch::shims {

// True where PyTorch would suggest the channels-last format for a 4-D or 5-D tensor: the strides ascend from the
// channel to the batch, and ambiguous ones (no channel, one pixel) count as row-major.
bool suggests_channels_last(const Tensor& tensor);
// A new tensor whose 4-D or 5-D sizes [N, C, ...] are laid out with the channel innermost, or row-major.
TensorPtr empty_format(DimSpan sizes, DType dtype, bool channels_last, Device device = {});
Dims channels_last_strides(DimSpan sizes);
// A copy with the channel innermost; another handle on src when it is so already.
TensorPtr channels_last_contiguous(const Tensor& src);

// A list argument that may hold one value for all `n` dimensions.
std::array<std::int64_t, 3> expand_list(DimSpan values, std::int64_t n, const char* op, const char* argument);

}  // namespace untorch::shims
