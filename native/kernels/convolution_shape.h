// The sizes of a convolution, on any device.
//
// One and two spatial dimensions are three with leading sizes of 1. Sizes: input [n, groups*in, d, h, w], output
// [n, groups*out, d, h, w]. Both are row-major (channels first) or have the channel innermost (channels last).
#pragma once

#include <array>
#include <cstdint>

namespace untorch::kernels {

struct ConvolutionShape {
  std::int64_t batch, groups;
  std::int64_t in_channels, out_channels;  // of one group
  std::array<std::int64_t, 3> input, kernel, output, stride, padding, dilation;
  bool channels_last;

  std::int64_t input_size() const noexcept { return input[0] * input[1] * input[2]; }
  std::int64_t output_size() const noexcept { return output[0] * output[1] * output[2]; }
  std::int64_t kernel_size() const noexcept { return kernel[0] * kernel[1] * kernel[2]; }
};

}  // namespace untorch::kernels
