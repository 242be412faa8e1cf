// What each kernel position reads for each output position, as the columns of a GEMM (im2col).
//
// columns[c, kd, kh, kw, position] of some output positions of one image: a warp writes rows of neighbouring positions,
// so that it reads neighbouring pixels where the stride is 1. Bound by the columns' bytes; the input is read again and
// again through L1 and L2.
#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32;

struct Problem {
  std::int64_t rows, first, count;
  bool narrow;
  std::int64_t input[3], kernel[3], output[3], stride[3], padding[3], dilation[3];
  ConvolutionStrides x;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    columns(const __grid_constant__ Problem p, const T* __restrict__ input, T* __restrict__ output) {
  const std::int64_t row = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= p.rows) return;
  std::int64_t channel = row, from[3];  // of the input, for output position 0
#pragma unroll
  for (int d = 2; d >= 0; --d) from[d] = split(channel, p.kernel[d], false) * p.dilation[d] - p.padding[d];
  const T* const x = input + channel * p.x.at[1];
  for (std::int64_t i = threadIdx.x % kWarp; i < p.count; i += kWarp) {
    std::int64_t rest = p.first + i, offset = 0;
    bool inside = true;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const std::int64_t at = p.output[d] == 1 ? 0 : split(rest, p.output[d], p.narrow);
      const std::int64_t pixel = at * p.stride[d] + from[d];
      inside = inside && pixel >= 0 && pixel < p.input[d];
      offset += pixel * p.x.at[2 + d];
    }
    output[row * p.count + i] = inside ? x[offset] : narrow<T>(0);
  }
}

}  // namespace

int convolution_columns(const ConvolutionShape& shape, DType dtype, const void* input,
                        const ConvolutionStrides& input_strides, std::int64_t first, std::int64_t count, void* output,
                        Stream stream) {
  Problem p{};
  p.rows = shape.groups * shape.in_channels * shape.kernel_size();
  p.first = first;
  p.count = count;
  p.narrow = shape.output_size() <= 0x7fffffff;
  if (p.rows == 0 || p.count == 0) return 0;
  for (std::size_t d = 0; d < 3; ++d) {
    p.input[d] = shape.input[d];
    p.kernel[d] = shape.kernel[d];
    p.output[d] = shape.output[d];
    p.stride[d] = shape.stride[d];
    p.padding[d] = shape.padding[d];
    p.dilation[d] = shape.dilation[d];
  }
  p.x = input_strides;
  constexpr std::int64_t kRows = kThreads / kWarp;
  const auto blocks = static_cast<unsigned>((p.rows + kRows - 1) / kRows);
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    columns<T><<<blocks, kThreads, 0, stream>>>(p, static_cast<const T*>(input), static_cast<T*>(output));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
