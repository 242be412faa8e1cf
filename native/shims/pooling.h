// What a pooling operator is asked for, checked, on any device.
#pragma once

#include <array>

#include "shims/shim.h"

namespace untorch::shims {

// One and two spatial dimensions are three with leading sizes of 1.
struct PoolProblem {
  std::size_t spatial = 0;  // how many dimensions are there
  std::int64_t batch = 1, channels = 1;
  std::array<std::int64_t, 3> input{1, 1, 1}, output{1, 1, 1};
  bool adaptive = false;  // windows follow from the sizes, and the next four say nothing
  std::array<std::int64_t, 3> kernel{1, 1, 1}, stride{1, 1, 1}, padding{0, 0, 0}, dilation{1, 1, 1};
  // Of the input, in elements; 0 for dimensions that are not there.
  std::int64_t batch_stride = 0, channel_stride = 0;
  std::array<std::int64_t, 3> input_stride{};
  Dims sizes;                  // of the output
  bool channels_last = false;  // the output's format
};

// `n` spatial dimensions over [c, …] or [n, c, …]. An empty stride is the kernel's.
PoolProblem sliding_pool(const char* op, const Tensor& input, std::int64_t n, DimSpan kernel, DimSpan stride,
                         DimSpan padding, DimSpan dilation, bool ceil_mode, bool keep_channels_last);
PoolProblem adaptive_pool(const char* op, const Tensor& input, std::int64_t n, DimSpan output, bool keep_channels_last);

}  // namespace untorch::shims
