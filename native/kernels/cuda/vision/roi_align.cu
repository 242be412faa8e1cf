// RoIAlign: one thread an output element, a grid-stride loop; each averages bilinear samples of its bin.
//
// Layout: input [batch, channels, height, width], rois [regions, 5], output [regions, channels, ph, pw], row-major.
// Neighbouring threads are neighbouring bins of one row, whose samples share cache lines.
//
// Roofline: four loads and about 30 operations a sample, mostly from L1 and L2: bound by their latency. Its share has
// not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/detection.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ Compute<T> sample(const T* __restrict__ plane, int height, int width, Compute<T> y,
                                             Compute<T> x) {
  using C = Compute<T>;
  if (y < C(-1) || y > C(height) || x < C(-1) || x > C(width)) return C(0);
  y = y <= C(0) ? C(0) : y;
  x = x <= C(0) ? C(0) : x;
  int top = static_cast<int>(y), left = static_cast<int>(x), bottom = top + 1, right = left + 1;
  if (top >= height - 1) {
    top = bottom = height - 1;
    y = static_cast<C>(top);
  }
  if (left >= width - 1) {
    left = right = width - 1;
    x = static_cast<C>(left);
  }
  const C down = y - static_cast<C>(top), across = x - static_cast<C>(left), up = C(1) - down, back = C(1) - across;
  const auto at = [&](int row, int column) { return widen(plane[static_cast<std::int64_t>(row) * width + column]); };
  return up * back * at(top, left) + up * across * at(top, right) + down * back * at(bottom, left) +
         down * across * at(bottom, right);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    align(const __grid_constant__ RoiAlign p, std::int64_t numel, const T* __restrict__ input,
          const T* __restrict__ rois, T* __restrict__ out, FaultWord* faults) {
  using C = Compute<T>;
  const int height = static_cast<int>(p.height), width = static_cast<int>(p.width);
  const C scale = static_cast<C>(p.spatial_scale), shift = p.aligned ? C(0.5) : C(0);
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t rest = i;
    const auto column = static_cast<int>(rest % p.pooled_width);
    rest /= p.pooled_width;
    const auto row = static_cast<int>(rest % p.pooled_height);
    rest /= p.pooled_height;
    const std::int64_t channel = rest % p.channels, region = rest / p.channels;
    const T* const roi = rois + region * 5;
    const auto image = static_cast<std::int64_t>(widen(roi[0]));
    if (image < 0 || image >= p.batch) {
      report(faults, DeviceFault::kRoiImage, image);
      out[i] = narrow<T>(C(0));
      continue;
    }
    const C left = widen(roi[1]) * scale - shift, top = widen(roi[2]) * scale - shift;
    C roi_width = widen(roi[3]) * scale - shift - left, roi_height = widen(roi[4]) * scale - shift - top;
    if (!p.aligned) {
      roi_width = roi_width > C(1) ? roi_width : C(1);
      roi_height = roi_height > C(1) ? roi_height : C(1);
    }
    const C bin_height = roi_height / static_cast<C>(p.pooled_height),
            bin_width = roi_width / static_cast<C>(p.pooled_width);
    const int rows = p.sampling_ratio > 0 ? static_cast<int>(p.sampling_ratio) : static_cast<int>(ceil(bin_height)),
              columns = p.sampling_ratio > 0 ? static_cast<int>(p.sampling_ratio) : static_cast<int>(ceil(bin_width));
    const T* const plane = input + (image * p.channels + channel) * p.height * p.width;
    C sum = 0;
    for (int a = 0; a < rows; ++a) {
      const C y =
          top + static_cast<C>(row) * bin_height + (static_cast<C>(a) + C(0.5)) * bin_height / static_cast<C>(rows);
      for (int b = 0; b < columns; ++b) {
        const C x = left + static_cast<C>(column) * bin_width +
                    (static_cast<C>(b) + C(0.5)) * bin_width / static_cast<C>(columns);
        sum += sample(plane, height, width, y, x);
      }
    }
    const int count = rows * columns;
    out[i] = narrow<T>(sum / static_cast<C>(count > 1 ? count : 1));
  }
}

}  // namespace

int roi_align(const RoiAlign& p, FaultWord* faults, Stream stream) {
  const std::int64_t numel = p.regions * p.channels * p.pooled_height * p.pooled_width;
  if (numel == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    align<T><<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(
        p, numel, static_cast<const T*>(p.input), static_cast<const T*>(p.rois), static_cast<T*>(p.out), faults);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
