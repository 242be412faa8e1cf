// Depthwise convolution of row-major images: a thread computes four outputs of a column, a sliding window along H.
//
//   thread      one (image, channel) plane, one output column, rows 4 i .. 4 i + 3; lanes along W, so loads are
//   coalesced window      (4 - 1) · stride + K input rows, each loaded once and used by every output that it belongs to
//   weights     K values of one kernel column in registers at a time, read through L1
//
// Roofline: bytes = input + output, 2 K² operations an output: bound by DRAM for large images, by L1 loads for small
// ones, (3 · stride + K) · K / 4 an output in place of K². Share of the roofline: not measured alone.
#include <algorithm>

#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 128, kRows = 4;

struct Planes {
  std::int32_t threads, channels, strips;  // strips: of kRows output rows
  std::int32_t height, width, out_height, out_width, pad_height, pad_width;
};

template <class T, int kKernel, int kStride>
__global__ void __launch_bounds__(kThreads)
    depthwise(const __grid_constant__ Planes p, const T* __restrict__ input, const T* __restrict__ weight,
              const T* __restrict__ bias, T* __restrict__ output) {
  using C = Compute<T>;
  const std::uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= static_cast<std::uint32_t>(p.threads)) return;
  const std::uint32_t column = index % p.out_width, rest = index / p.out_width;
  const std::uint32_t strip = rest % p.strips, plane = rest / p.strips, channel = plane % p.channels;
  const int top = static_cast<int>(strip) * kRows;
  const int first_row = top * kStride - p.pad_height, first_column = static_cast<int>(column) * kStride - p.pad_width;
  const T* const x = input + std::int64_t{plane} * (p.height * p.width);
  const T* const w = weight + std::int64_t{channel} * (kKernel * kKernel);

  C sums[kRows] = {};
#pragma unroll
  for (int kw = 0; kw < kKernel; ++kw) {
    const int from = first_column + kw;
    if (from < 0 || from >= p.width) continue;
    C by[kKernel];
#pragma unroll
    for (int kh = 0; kh < kKernel; ++kh) by[kh] = widen(w[kh * kKernel + kw]);
#pragma unroll
    for (int r = 0; r < (kRows - 1) * kStride + kKernel; ++r) {
      const int row = first_row + r;
      const C value = row >= 0 && row < p.height ? widen(x[row * p.width + from]) : C(0);
#pragma unroll
      for (int out = 0; out < kRows; ++out) {
        const int kh = r - out * kStride;
        if (kh >= 0 && kh < kKernel) sums[out] += value * by[kh];
      }
    }
  }
  const C added = bias == nullptr ? C(0) : widen(bias[channel]);
  T* const to = output + std::int64_t{plane} * (p.out_height * p.out_width) + column;
#pragma unroll
  for (int out = 0; out < kRows; ++out) {
    if (top + out < p.out_height) to[(top + out) * p.out_width] = narrow<T>(sums[out] + added);
  }
}

std::int64_t strips_of(const ConvolutionShape& s) { return (s.output[1] + kRows - 1) / kRows; }

}  // namespace

bool serves_depthwise_rows(const ConvolutionShape& s) {
  const bool image = s.in_channels == 1 && s.out_channels == 1 && !s.channels_last && s.input[0] == 1 &&
                     s.kernel[0] == 1 && s.output[0] == 1;
  const bool square =
      s.kernel[1] == s.kernel[2] && s.stride[1] == s.stride[2] && s.dilation[1] == 1 && s.dilation[2] == 1;
  const bool made = (s.kernel[1] == 3 || s.kernel[1] == 5 || s.kernel[1] == 7) && s.stride[1] <= 2;
  // Indices have 32 bits, so have those of a plane.
  constexpr std::int64_t kSide = 1 << 14, kThreadsMost = 1 << 30;
  const bool small = std::max({s.input[1], s.input[2], s.output[1], s.output[2], s.padding[1], s.padding[2]}) <= kSide;
  return image && square && made && small && s.groups <= kThreadsMost && s.batch <= kThreadsMost &&
         static_cast<double>(s.batch) * static_cast<double>(s.groups) * static_cast<double>(strips_of(s)) *
                 static_cast<double>(s.output[2]) <=
             static_cast<double>(kThreadsMost);
}

int convolution_depthwise_rows(const ConvolutionShape& s, DType dtype, const void* input, const void* weight,
                               const void* bias, void* output, Stream stream) {
  if (!serves_depthwise_rows(s)) return kNoKernel;
  const std::int64_t planes = s.batch * s.groups, strips = strips_of(s);
  const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const Planes p{narrow(planes * strips * s.output[2]),
                 narrow(s.groups),
                 narrow(strips),
                 narrow(s.input[1]),
                 narrow(s.input[2]),
                 narrow(s.output[1]),
                 narrow(s.output[2]),
                 narrow(s.padding[1]),
                 narrow(s.padding[2])};
  const auto blocks = static_cast<unsigned>((p.threads + kThreads - 1) / kThreads);
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto* run) {
      run<<<blocks, kThreads, 0, stream>>>(p, static_cast<const T*>(input), static_cast<const T*>(weight),
                                           static_cast<const T*>(bias), static_cast<T*>(output));
      return static_cast<int>(cudaGetLastError());
    };
    switch (s.kernel[1] * 2 + s.stride[1]) {
      case 3 * 2 + 1:
        return launch(&depthwise<T, 3, 1>);
      case 3 * 2 + 2:
        return launch(&depthwise<T, 3, 2>);
      case 5 * 2 + 1:
        return launch(&depthwise<T, 5, 1>);
      case 5 * 2 + 2:
        return launch(&depthwise<T, 5, 2>);
      case 7 * 2 + 1:
        return launch(&depthwise<T, 7, 1>);
      default:
        return launch(&depthwise<T, 7, 2>);
    }
  });
}

}  // namespace untorch::kernels::cuda
