// Direct convolution, forward and transposed: one thread an output element, no im2col, no shared memory.
//
// Layout: threads run in the output's memory order, so that a warp reads neighbouring pixels (row-major) or
// neighbouring channels (channels last):
//
//   row-major      out[n, c, d, h, w]    lanes along w      x[n, c, d', h', w'] coalesced
//   channels last  out[n, d, h, w, c]    lanes along c      x and weight[c] coalesced
//
// Roofline, depthwise: bytes = input + output (overlapping windows hit L1 and L2, weights stay in L1), 2 · kernel size
// operations an output: bound by DRAM. With many channels a group: two loads a multiply-add, bound by L1 bandwidth;
// cuDNN serves those. The share of the roofline has not been measured.
#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/cuda/convolution/epilogue.cuh"
#include "kernels/cuda/convolution/spatial_sizes.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

struct Problem : SpatialSizes {
  std::int64_t numel, groups, in_channels, out_channels;
  ConvolutionStrides x, w;
  bool channels_last, narrow;
};

struct Place {
  std::int64_t n, c, at[3];
};

__device__ __forceinline__ Place place_of(const Problem& p, std::int64_t index) {
  Place place;
  const std::int64_t channels = p.out_channels * p.groups;
  if (p.channels_last) place.c = split(index, channels, p.narrow);
  place.at[2] = split(index, p.output[2], p.narrow);
  place.at[1] = split(index, p.output[1], p.narrow);
  place.at[0] = split(index, p.output[0], p.narrow);
  if (!p.channels_last) place.c = split(index, channels, p.narrow);
  place.n = index;
  return place;
}

// Where in the input kernel position k of output position o reads; -1: nowhere.
template <bool kTransposed>
__device__ __forceinline__ std::int64_t source(const Problem& p, int d, std::int64_t o, std::int64_t k) {
  if constexpr (kTransposed) {
    const std::int64_t scaled = o + p.padding[d] - k * p.dilation[d];
    if (scaled < 0) return -1;
    std::int64_t position = scaled;
    if (split(position, p.stride[d], p.narrow) != 0) return -1;
    return position < p.input[d] ? position : -1;
  } else {
    const std::int64_t position = o * p.stride[d] - p.padding[d] + k * p.dilation[d];
    return position >= 0 && position < p.input[d] ? position : -1;
  }
}

template <class T, bool kTransposed>
__global__ void __launch_bounds__(kThreads)
    direct(const __grid_constant__ Problem p, const T* __restrict__ input, const T* __restrict__ weight,
           const T* __restrict__ bias, T* __restrict__ output) {
  using C = Compute<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < p.numel; i += step) {
    const Place to = place_of(p, i);
    std::int64_t group = to.c;
    const std::int64_t channel = split(group, p.out_channels, p.narrow);  // of the group
    const T* const x = input + to.n * p.x.at[0] + group * p.in_channels * p.x.at[1];
    const T* const w =
        kTransposed ? weight + group * p.in_channels * p.w.at[0] + channel * p.w.at[1] : weight + to.c * p.w.at[0];
    const std::int64_t w_step = kTransposed ? p.w.at[0] : p.w.at[1];
    C sum = 0;
    for (std::int64_t kd = 0; kd < p.kernel[0]; ++kd) {
      const std::int64_t d = source<kTransposed>(p, 0, to.at[0], kd);
      if (d < 0) continue;
      for (std::int64_t kh = 0; kh < p.kernel[1]; ++kh) {
        const std::int64_t h = source<kTransposed>(p, 1, to.at[1], kh);
        if (h < 0) continue;
        for (std::int64_t kw = 0; kw < p.kernel[2]; ++kw) {
          const std::int64_t v = source<kTransposed>(p, 2, to.at[2], kw);
          if (v < 0) continue;
          const T* from = x + d * p.x.at[2] + h * p.x.at[3] + v * p.x.at[4];
          const T* by = w + kd * p.w.at[2] + kh * p.w.at[3] + kw * p.w.at[4];
          for (std::int64_t c = 0; c < p.in_channels; ++c) {
            sum += widen(*from) * widen(*by);
            from += p.x.at[1];
            by += w_step;
          }
        }
      }
    }
    if (bias != nullptr) sum += widen(bias[to.c]);
    output[i] = narrow<T>(sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    apply(std::int64_t numel, std::int64_t channels, std::int64_t inner, bool narrow_index, const T* __restrict__ bias,
          const T* __restrict__ residual, const __grid_constant__ ConvolutionEpilogue epilogue,
          T* __restrict__ output) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    auto value = widen(output[i]);
    if (bias != nullptr) {
      std::int64_t rest = i;
      if (inner != 1) (void)split(rest, inner, narrow_index);
      value += widen(bias[split(rest, channels, narrow_index)]);
    }
    if (residual != nullptr) value += widen(residual[i]);
    output[i] = narrow<T>(activated(value, epilogue));
  }
}

}  // namespace

int convolution_direct(const ConvolutionShape& shape, bool transposed, DType dtype, const void* input,
                       const ConvolutionStrides& input_strides, const void* weight,
                       const ConvolutionStrides& weight_strides, const void* bias, void* output, Stream stream) {
  Problem p{};
  static_cast<SpatialSizes&>(p) = spatial_sizes(shape);
  p.numel = shape.batch * shape.groups * shape.out_channels * shape.output_size();
  if (p.numel == 0) return 0;
  p.groups = shape.groups;
  p.in_channels = shape.in_channels;
  p.out_channels = shape.out_channels;
  bool narrow = p.numel <= 0x7fffffff;
  for (std::size_t d = 0; d < 3; ++d) {
    narrow = narrow && shape.stride[d] <= 0x7fffffff && shape.output[d] + shape.padding[d] <= 0x7fffffff;
  }
  p.x = input_strides;
  p.w = weight_strides;
  p.channels_last = shape.channels_last;
  p.narrow = narrow;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto* kernel) {
      kernel<<<blocks_for(p.numel, kThreads), kThreads, 0, stream>>>(
          p, static_cast<const T*>(input), static_cast<const T*>(weight), static_cast<const T*>(bias),
          static_cast<T*>(output));
    };
    if (transposed)
      launch(&direct<T, true>);
    else
      launch(&direct<T, false>);
    return cudaGetLastError();
  });
}

int convolution_epilogue(const ConvolutionShape& shape, DType dtype, const void* bias, const void* residual,
                         const ConvolutionEpilogue& epilogue, void* output, Stream stream) {
  const std::int64_t channels = shape.groups * shape.out_channels, numel = shape.batch * channels * shape.output_size();
  const bool nothing = bias == nullptr && residual == nullptr && epilogue.activation == FusedUnary::kNone;
  if (numel == 0 || nothing) return 0;
  const std::int64_t inner = shape.channels_last ? 1 : shape.output_size();
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    apply<T><<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(
        numel, channels, inner, numel <= 0x7fffffff, static_cast<const T*>(bias), static_cast<const T*>(residual),
        epilogue, static_cast<T*>(output));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
