// Average and maximum pooling over windows of up to three dimensions, also the adaptive kinds.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace untorch::kernels {

// The windows of one dimension: output i reads start[i], start[i] + step, … below stop[i]; covered[i] is the length
// that an average over padding divides by.
struct PoolWindows {
  std::vector<std::int64_t> start, stop, covered;
  std::int64_t step = 1;
};

PoolWindows sliding_windows(std::int64_t input, std::int64_t output, std::int64_t kernel, std::int64_t stride,
                            std::int64_t padding, std::int64_t dilation);
PoolWindows adaptive_windows(std::int64_t input, std::int64_t output);

// Addresses are data + n*batch_stride + c*channel_stride + the spatial strides; in elements.
struct PoolLayout {
  std::int64_t batch_stride, channel_stride;
  std::array<std::int64_t, 3> stride;
};

struct PoolShape {
  std::int64_t batch, channels;
  std::array<std::int64_t, 3> input, output;
  std::array<PoolWindows, 3> windows;
  PoolLayout in, out;
  // Channels innermost in memory: loops run over them last.
  bool channels_innermost;
};

enum class Divisor { kWindow, kCovered, kFixed };

template <class T>
void avg_pool(const PoolShape& shape, Divisor divisor, std::int64_t fixed, const T* input, T* output);
// indices: position d*H*W + h*W + w of each maximum, laid out like the output. NaN wins; the first of equals.
template <class T>
void max_pool(const PoolShape& shape, const T* input, T* output, std::int64_t* indices);

}  // namespace untorch::kernels
