// What each kernel position reads for each output position, as the columns of a GEMM (im2col), of some output positions
// of one channels-last image:
//
//   columns[group, position, kd, kh, kw, c]   lanes along a pixel's channels, of which a thread moves 16 bytes, or one
//                                             element where they are not whole
//
// Bound by the columns' bytes; the input is read again and again through L1 and L2.
#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/cuda/convolution/spatial_sizes.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Problem : SpatialSizes {
  std::int64_t numel;            // of the output, in vectors
  std::int64_t vectors, groups;  // vectors of a group's channels
  std::int64_t first, count;
  bool narrow;
};

template <class V>
__global__ void __launch_bounds__(kThreads)
    columns(const __grid_constant__ Problem p, const V* __restrict__ input, V* __restrict__ output) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.numel; i += step) {
    std::int64_t rest = i, from[3];  // of the input, for output position 0
    const std::int64_t vector = split(rest, p.vectors, p.narrow);
#pragma unroll
    for (int d = 2; d >= 0; --d) from[d] = split(rest, p.kernel[d], p.narrow) * p.dilation[d] - p.padding[d];
    std::int64_t position = p.first + split(rest, p.count, p.narrow);
    std::int64_t pixel = 0, pixels = 1;
    bool inside = true;
#pragma unroll
    for (int d = 2; d >= 0; --d) {
      const std::int64_t at = p.output[d] == 1 ? 0 : split(position, p.output[d], p.narrow);
      const std::int64_t place = at * p.stride[d] + from[d];
      inside = inside && place >= 0 && place < p.input[d];
      pixel += place * pixels;
      pixels *= p.input[d];
    }
    output[i] = inside ? input[(pixel * p.groups + rest) * p.vectors + vector] : V{};
  }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

}  // namespace

int convolution_columns(const ConvolutionShape& shape, DType dtype, const void* input, std::int64_t first,
                        std::int64_t count, void* output, Stream stream) {
  Problem p{};
  static_cast<SpatialSizes&>(p) = spatial_sizes(shape);
  p.groups = shape.groups;
  p.first = first;
  p.count = count;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = Bits<sizeof(typename decltype(type)::type)>;
    constexpr int kLanes = 16 / sizeof(T);
    const bool whole = shape.in_channels % kLanes == 0 && aligned(input) && aligned(output);
    p.vectors = shape.in_channels / (whole ? kLanes : 1);
    p.numel = shape.groups * count * shape.kernel_size() * p.vectors;
    p.narrow = p.numel <= 0x7fffffff && shape.output_size() <= 0x7fffffff;
    if (p.numel == 0) return 0;
    const auto launch = [&](auto vector) -> int {
      using V = decltype(vector);
      columns<V><<<blocks_for(p.numel, kThreads), kThreads, 0, stream>>>(p, static_cast<const V*>(input),
                                                                         static_cast<V*>(output));
      return cudaGetLastError();
    };
    return whole ? launch(Bits<16>()) : launch(T());
  });
}

}  // namespace untorch::kernels::cuda
