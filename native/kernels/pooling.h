// Average and maximum pooling over windows of up to three dimensions, sliding and adaptive.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels {

// Fewer than three spatial dimensions have leading sizes of 1. The input has any strides (elements); the output is
// dense: row-major, or with the channel innermost.
struct Pool {
  std::int64_t batch = 1, channels = 1;
  std::int64_t input[3] = {1, 1, 1}, output[3] = {1, 1, 1};
  bool adaptive = false;  // windows follow from the sizes, and the next four say nothing
  std::int64_t kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, padding[3] = {}, dilation[3] = {1, 1, 1};
  std::int64_t in_batch = 0, in_channel = 0, in_at[3] = {};
  bool channels_last = false;
};

// What an average divides by: the inputs of the window, the window with padding, or a number.
enum class PoolDivisor : std::int8_t { kWindow, kCovered, kFixed };

// max_pool's indices: position d·H·W + h·W + w of each maximum, laid out like the output. NaN wins; the first of
// equals.
namespace cpu {  // floating dtypes and uint8 to int64
void avg_pool(const Pool& pool, PoolDivisor divisor, std::int64_t fixed, DType dtype, const void* input, void* output);
void max_pool(const Pool& pool, DType dtype, const void* input, void* output, std::int64_t* indices);
}  // namespace cpu
namespace cuda {  // floating dtypes
int avg_pool(const Pool& pool, PoolDivisor divisor, std::int64_t fixed, DType dtype, const void* input, void* output,
             Stream stream);
int max_pool(const Pool& pool, DType dtype, const void* input, void* output, std::int64_t* indices, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
