// Grid sampling. One thread a point of the grid, which finds its corners and weights once and walks the channels:
// neighbouring threads write neighbouring outputs of each channel. Bytes: the grid and the output once, the input as
// often as the points lie apart; eight multiply-adds an output value.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/grid_sampler.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float floor_of(float x) { return floorf(x); }
__device__ __forceinline__ double floor_of(double x) { return floor(x); }
__device__ __forceinline__ float remainder_of(float x, float y) { return fmodf(x, y); }
__device__ __forceinline__ double remainder_of(double x, double y) { return fmod(x, y); }
__device__ __forceinline__ std::int64_t nearest_of(float x) { return __float2ll_rn(x); }
__device__ __forceinline__ std::int64_t nearest_of(double x) { return __double2ll_rn(x); }

// Folds x into [low/2, high/2] as between two mirrors.
template <class C>
__device__ __forceinline__ C reflect(C x, std::int64_t low, std::int64_t high) {
  if (low == high) return C(0);
  const C least = static_cast<C>(low) / 2, span = static_cast<C>(high - low) / 2;
  const C distance = x < least ? least - x : x - least, rest = remainder_of(distance, span);
  const bool even = remainder_of(floor_of(distance / span), C(2)) == C(0);
  return even ? rest + least : span - rest + least;
}

// A grid coordinate in [-1, 1] as a position in [0, size), with the padding rule applied.
template <class C>
__device__ __forceinline__ C position(C coordinate, std::int64_t size, GridPadding padding, bool align_corners) {
  C x = align_corners ? (coordinate + 1) / 2 * static_cast<C>(size - 1)
                      : ((coordinate + 1) * static_cast<C>(size) - 1) / 2;
  if (padding == GridPadding::kReflection) {
    x = align_corners ? reflect(x, 0, 2 * (size - 1)) : reflect(x, -1, 2 * size - 1);
  }
  if (padding != GridPadding::kZeros) {
    x = x > C(0) ? x : C(0);  // NaN takes the first
    x = x < static_cast<C>(size - 1) ? x : static_cast<C>(size - 1);
  }
  // Far outside (or NaN): any position that no voxel has; also keeps the conversion to an integer defined.
  if (!(x > C(-1e9) && x < C(1e9))) x = C(-100);
  return x;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sample(const __grid_constant__ GridSample p, std::int64_t count, bool narrow_index, const T* __restrict__ input,
           const T* __restrict__ grid, T* __restrict__ output) {
  using C = Compute<T>;
  const std::int64_t points = p.output[0] * p.output[1] * p.output[2];
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    std::int64_t rest = i;
    const std::int64_t ow = split(rest, p.output[2], narrow_index), oh = split(rest, p.output[1], narrow_index),
                       od = split(rest, p.output[0], narrow_index), n = rest;
    const T* const at = grid + n * p.grid_at[0] + od * p.grid_at[2] + oh * p.grid_at[3] + ow * p.grid_at[4];
    const C x = position(static_cast<C>(widen(at[0])), p.input[2], p.padding, p.align_corners);
    const C y = position(static_cast<C>(widen(at[p.grid_at[1]])), p.input[1], p.padding, p.align_corners);
    const C z = position(static_cast<C>(widen(at[2 * p.grid_at[1]])), p.input[0], p.padding, p.align_corners);
    const T* const from = input + n * p.in_at[0];
    T* const to = output + n * p.channels * points + (i - n * points);
    if (p.nearest) {
      const std::int64_t ix = nearest_of(x), iy = nearest_of(y), iz = nearest_of(z);
      const bool hit = ix >= 0 && ix < p.input[2] && iy >= 0 && iy < p.input[1] && iz >= 0 && iz < p.input[0];
      const std::int64_t offset = iz * p.in_at[2] + iy * p.in_at[3] + ix * p.in_at[4];
      for (std::int64_t c = 0; c < p.channels; ++c) {
        to[c * points] = hit ? from[c * p.in_at[1] + offset] : narrow<T>(C(0));
      }
      continue;
    }
    const C x0 = floor_of(x), y0 = floor_of(y), z0 = floor_of(z);
    std::int64_t offsets[8];
    C weights[8];
#pragma unroll
    for (int corner = 0; corner < 8; ++corner) {
      const int dx = corner & 1, dy = corner >> 1 & 1, dz = corner >> 2;
      const std::int64_t ix = static_cast<std::int64_t>(x0) + dx, iy = static_cast<std::int64_t>(y0) + dy,
                         iz = static_cast<std::int64_t>(z0) + dz;
      const C wx = dx != 0 ? x - x0 : x0 + 1 - x, wy = dy != 0 ? y - y0 : y0 + 1 - y,
              wz = dz != 0 ? z - z0 : z0 + 1 - z;
      const bool inside = ix >= 0 && ix < p.input[2] && iy >= 0 && iy < p.input[1] && iz >= 0 && iz < p.input[0];
      offsets[corner] = inside ? iz * p.in_at[2] + iy * p.in_at[3] + ix * p.in_at[4] : -1;
      weights[corner] = wx * wy * wz;
    }
    for (std::int64_t c = 0; c < p.channels; ++c) {
      C sum = 0;
#pragma unroll
      for (int corner = 0; corner < 8; ++corner) {
        if (offsets[corner] >= 0) sum += widen(from[c * p.in_at[1] + offsets[corner]]) * weights[corner];
      }
      to[c * points] = narrow<T>(sum);
    }
  }
}

}  // namespace

int grid_sample(const GridSample& p, DType dtype, const void* input, const void* grid, void* output, Stream stream) {
  const std::int64_t count = p.batch * p.output[0] * p.output[1] * p.output[2];
  if (count == 0 || p.channels == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    sample<T><<<blocks_for(count, kThreads), kThreads, 0, stream>>>(
        p, count, count <= 0x7fffffff, static_cast<const T*>(input), static_cast<const T*>(grid),
        static_cast<T*>(output));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
