// Pooling: one thread an output element; averages over few, large windows (adaptive pooling to 1×1) take one warp an
// output element, whose lanes stride over the window and reduce with shuffles.
//
// Layout: threads run in the output's memory order, so that the lanes of a warp read neighbouring windows (row-major)
// or neighbouring channels (channels last), coalesced; overlapping windows hit L1 and L2.
//
// Roofline: bytes = input once, output (and indices) once; one operation an input element of a window: bound by DRAM.
// Its share has not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/pooling.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr std::int64_t kWarpWindow = 64;  // inputs of a window from which a warp is worth it

struct Window {
  std::int64_t begin[3], end[3], covered;
};

__device__ __forceinline__ std::int64_t divide(std::int64_t a, std::int64_t b, bool narrow) {
  return narrow ? static_cast<std::int64_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b)) : a / b;
}

// The window of output position `at`: positions begin, begin + dilation, … below end.
__device__ __forceinline__ Window window_of(const Pool& p, const std::int64_t (&at)[3], bool narrow) {
  Window window;
  window.covered = 1;
#pragma unroll
  for (int d = 0; d < 3; ++d) {
    if (p.adaptive) {
      window.begin[d] = divide(at[d] * p.input[d], p.output[d], narrow);
      window.end[d] = divide((at[d] + 1) * p.input[d] + p.output[d] - 1, p.output[d], narrow);
      window.covered *= window.end[d] - window.begin[d];
    } else {
      std::int64_t begin = at[d] * p.stride[d] - p.padding[d];
      window.covered *= min(begin + p.kernel[d], p.input[d] + p.padding[d]) - begin;
      const std::int64_t end = min(begin + (p.kernel[d] - 1) * p.dilation[d] + 1, p.input[d]);
      while (begin < 0) begin += p.dilation[d];
      window.begin[d] = begin;
      window.end[d] = max(end, begin);
    }
  }
  return window;
}

struct Place {
  std::int64_t n, c, at[3];
};

__device__ __forceinline__ Place place_of(const Pool& p, std::int64_t index, bool narrow) {
  Place place;
  if (p.channels_last) place.c = split(index, p.channels, narrow);
  place.at[2] = split(index, p.output[2], narrow);
  place.at[1] = split(index, p.output[1], narrow);
  place.at[0] = split(index, p.output[0], narrow);
  if (!p.channels_last) place.c = split(index, p.channels, narrow);
  place.n = index;
  return place;
}

template <class C>
__device__ __forceinline__ C mean(C sum, const Window& window, PoolDivisor divisor, std::int64_t fixed) {
  const std::int64_t count =
      (window.end[0] - window.begin[0]) * (window.end[1] - window.begin[1]) * (window.end[2] - window.begin[2]);
  if (count <= 0) return C(0);  // a window wholly in the padding
  const std::int64_t by = divisor == PoolDivisor::kFixed     ? fixed
                          : divisor == PoolDivisor::kCovered ? window.covered
                                                             : count;
  return sum / static_cast<C>(by);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    average(const __grid_constant__ Pool p, std::int64_t numel, bool narrow_index, PoolDivisor divisor,
            std::int64_t fixed, const T* __restrict__ input, T* __restrict__ output) {
  using C = Compute<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const Place to = place_of(p, i, narrow_index);
    const Window w = window_of(p, to.at, narrow_index);
    const T* const from = input + to.n * p.in_batch + to.c * p.in_channel;
    C sum = 0;
    for (std::int64_t d = w.begin[0]; d < w.end[0]; ++d) {
      for (std::int64_t h = w.begin[1]; h < w.end[1]; ++h) {
        const T* const row = from + d * p.in_at[0] + h * p.in_at[1];
        for (std::int64_t v = w.begin[2]; v < w.end[2]; ++v) sum += widen(row[v * p.in_at[2]]);
      }
    }
    output[i] = narrow<T>(mean(sum, w, divisor, fixed));
  }
}

// A warp an output: lanes take every 32nd input of the window, then add up by halves.
template <class T>
__global__ void __launch_bounds__(kThreads)
    average_by_warp(const __grid_constant__ Pool p, std::int64_t numel, bool narrow_index, PoolDivisor divisor,
                    std::int64_t fixed, const T* __restrict__ input, T* __restrict__ output) {
  using C = Compute<T>;
  constexpr int kWarps = kThreads / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; i < numel; i += step) {
    const Place to = place_of(p, i, narrow_index);
    const Window w = window_of(p, to.at, narrow_index);
    const T* const from = input + to.n * p.in_batch + to.c * p.in_channel;
    const std::int64_t rows = w.end[1] - w.begin[1], columns = w.end[2] - w.begin[2];
    const std::int64_t count = (w.end[0] - w.begin[0]) * rows * columns;
    C sum = 0;
    for (std::int64_t k = lane; k < count; k += kWarp) {
      std::int64_t rest = k;
      const std::int64_t v = split(rest, columns, narrow_index), h = split(rest, rows, narrow_index);
      sum +=
          widen(from[(w.begin[0] + rest) * p.in_at[0] + (w.begin[1] + h) * p.in_at[1] + (w.begin[2] + v) * p.in_at[2]]);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) output[i] = narrow<T>(mean(sum, w, divisor, fixed));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    maximum(const __grid_constant__ Pool p, std::int64_t numel, bool narrow_index, const T* __restrict__ input,
            T* __restrict__ output, std::int64_t* __restrict__ indices) {
  using C = Compute<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  const std::int64_t step_d = p.adaptive ? 1 : p.dilation[0], step_h = p.adaptive ? 1 : p.dilation[1],
                     step_w = p.adaptive ? 1 : p.dilation[2];
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const Place to = place_of(p, i, narrow_index);
    const Window w = window_of(p, to.at, narrow_index);
    const T* const from = input + to.n * p.in_batch + to.c * p.in_channel;
    C best = -static_cast<C>(INFINITY);
    std::int64_t at = (w.begin[0] * p.input[1] + w.begin[1]) * p.input[2] + w.begin[2];
    for (std::int64_t d = w.begin[0]; d < w.end[0]; d += step_d) {
      for (std::int64_t h = w.begin[1]; h < w.end[1]; h += step_h) {
        const T* const row = from + d * p.in_at[0] + h * p.in_at[1];
        for (std::int64_t v = w.begin[2]; v < w.end[2]; v += step_w) {
          const C value = widen(row[v * p.in_at[2]]);
          if (value > best || value != value) {
            best = value;
            at = (d * p.input[1] + h) * p.input[2] + v;
          }
        }
      }
    }
    output[i] = narrow<T>(best);
    indices[i] = at;
  }
}

std::int64_t numel_of(const Pool& p) { return p.batch * p.channels * p.output[0] * p.output[1] * p.output[2]; }

// All index arithmetic of the windows fits into 32 bits.
bool fits_narrow(const Pool& p) {
  constexpr std::int64_t kLimit = 0x7fffffff;
  bool fits = numel_of(p) <= kLimit && p.input[0] * p.input[1] * p.input[2] <= kLimit;
  for (int d = 0; d < 3; ++d) fits = fits && (p.output[d] + 1) * (p.input[d] + 1) <= kLimit;
  return fits;
}

}  // namespace

int avg_pool(const Pool& p, PoolDivisor divisor, std::int64_t fixed, DType dtype, const void* input, void* output,
             Stream stream) {
  const std::int64_t numel = numel_of(p);
  if (numel == 0) return 0;
  const bool narrow_index = fits_narrow(p);
  std::int64_t window = 1;
  for (int d = 0; d < 3; ++d) window *= p.adaptive ? p.input[d] / p.output[d] : p.kernel[d];
  const bool by_warp = !p.channels_last && window >= kWarpWindow;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto* const from = static_cast<const T*>(input);
    auto* const to = static_cast<T*>(output);
    if (by_warp) {
      average_by_warp<T><<<blocks_for(numel, kThreads / kWarp), kThreads, 0, stream>>>(p, numel, narrow_index, divisor,
                                                                                       fixed, from, to);
    } else {
      average<T>
          <<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(p, numel, narrow_index, divisor, fixed, from, to);
    }
    return cudaGetLastError();
  });
}

int max_pool(const Pool& p, DType dtype, const void* input, void* output, std::int64_t* indices, Stream stream) {
  const std::int64_t numel = numel_of(p);
  if (numel == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    maximum<T><<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(
        p, numel, fits_narrow(p), static_cast<const T*>(input), static_cast<T*>(output), indices);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
