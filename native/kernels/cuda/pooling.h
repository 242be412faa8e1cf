// Average and maximum pooling over windows of up to three dimensions, sliding and adaptive.
#pragma once

#include "kernels/cuda/scalar.h"

namespace untorch::kernels::cuda {

// Fewer than three spatial dimensions have leading sizes of 1. The input has any strides (elements); the output is
// dense: row-major, or with the channel innermost.
struct Pool {
  std::int64_t batch, channels;
  std::int64_t input[3], output[3];
  bool adaptive;  // windows follow from the sizes, and the next four say nothing
  std::int64_t kernel[3], stride[3], padding[3], dilation[3];
  std::int64_t in_batch, in_channel, in_at[3];
  bool channels_last;
};

// What an average divides by: the inputs of the window, the window with padding, or a number.
enum class PoolDivisor : std::int8_t { kWindow, kCovered, kFixed };

int avg_pool(const Pool& pool, PoolDivisor divisor, std::int64_t fixed, Scalar dtype, const void* input, void* output,
             Stream stream);
// indices: position d·H·W + h·W + w of each maximum, laid out like the output. NaN wins; the first of equals.
int max_pool(const Pool& pool, Scalar dtype, const void* input, void* output, std::int64_t* indices, Stream stream);

}  // namespace untorch::kernels::cuda
