// cdist and pdist: tiled like a SIMT GEMM. A CTA of 256 threads makes a 32 x 32 tile of distances, four per thread,
// over 32 values of the rows at a time in shared memory. Trilinear: a warp per result.
//
//   left [batch, rows, length] ──┐ 32 x 32 in shared memory, a column of padding against bank conflicts
//   right [batch, columns, length] ┘ → accumulators (2 x 2 per thread) → out [batch, rows, columns]
//   trilinear: lane t takes the terms t, t + 32, …; then a butterfly of warp shuffles
//
// Roofline: FP32 (or FP64) arithmetic, three operations per term for the usual norms; a tile's step reads 2048 values
// for 32 · 32 · 32 terms. Differences are formed before they are squared: no cancellation, unlike |a|² + |b|² - 2ab.
// Share of the roofline: not measured alone.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/distance.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kTile = 32, kSide = 16, kThreads = kSide * kSide, kWarp = 32;

enum class Norm { kZero, kOne, kTwo, kInfinity, kAny };

template <Norm kNorm, class T>
__device__ __forceinline__ void accumulate(T& sum, T a, T b, T p) {
  const T d = a > b ? a - b : b - a;  // NaN stays NaN
  if constexpr (kNorm == Norm::kZero) sum += a != b ? T(1) : T(0);
  if constexpr (kNorm == Norm::kOne) sum += d;
  if constexpr (kNorm == Norm::kTwo) sum += d * d;
  if constexpr (kNorm == Norm::kInfinity) sum = d > sum || d != d ? d : sum;
  if constexpr (kNorm == Norm::kAny) sum += pow(d, p);
}

template <Norm kNorm, class T>
__device__ __forceinline__ T finish(T sum, T p) {
  if constexpr (kNorm == Norm::kTwo) return sqrt(sum);
  if constexpr (kNorm == Norm::kAny) return pow(sum, T(1) / p);
  return sum;
}

// CTAs are numbered batch, tile of rows, tile of columns, the last quickest.
template <Norm kNorm, class T>
__global__ void __launch_bounds__(kThreads)
    tiled(std::int64_t tiles, std::int64_t row_tiles, std::int64_t column_tiles, std::int64_t rows,
          std::int64_t columns, std::int64_t length, T p, bool condensed, const T* __restrict__ left,
          const T* __restrict__ right, T* __restrict__ out) {
  __shared__ T a[kTile][kTile + 1], b[kTile][kTile + 1];
  const int tx = static_cast<int>(threadIdx.x) % kSide, ty = static_cast<int>(threadIdx.x) / kSide;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t j0 = tile % column_tiles * kTile, rest = tile / column_tiles, i0 = rest % row_tiles * kTile,
                       item = rest / row_tiles;
    if (condensed && j0 + kTile <= i0) continue;  // below the diagonal; the whole CTA agrees
    const T* const x = left + item * rows * length;
    const T* const y = right + item * columns * length;
    T sum[2][2] = {};
    for (std::int64_t k0 = 0; k0 < length; k0 += kTile) {
#pragma unroll
      for (int at = static_cast<int>(threadIdx.x); at < kTile * kTile; at += kThreads) {
        const int r = at / kTile, c = at % kTile;
        const std::int64_t k = k0 + c;
        a[r][c] = i0 + r < rows && k < length ? x[(i0 + r) * length + k] : T(0);
        b[r][c] = j0 + r < columns && k < length ? y[(j0 + r) * length + k] : T(0);
      }
      __syncthreads();
      // Past the end both hold zeros, which add nothing to any norm.
#pragma unroll
      for (int k = 0; k < kTile; ++k) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            accumulate<kNorm>(sum[r][c], a[ty + r * kSide][k], b[tx + c * kSide][k], p);
          }
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const std::int64_t i = i0 + ty + r * kSide, j = j0 + tx + c * kSide;
        if (i >= rows || j >= columns || (condensed && j <= i)) continue;
        const std::int64_t to =
            condensed ? i * columns - i * (i + 1) / 2 + (j - i - 1) : (item * rows + i) * columns + j;
        out[to] = finish<kNorm>(sum[r][c], p);
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    trilinear_sum(const __grid_constant__ Strided<4> outer, const __grid_constant__ Strided<3> inner,
                  const T* __restrict__ a, const T* __restrict__ b, const T* __restrict__ c, T* __restrict__ out) {
  using C = Compute<T>;
  constexpr int kWarps = kThreads / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp; i < outer.numel; i += step) {
    std::int64_t base[4];
    offsets(outer, i, base);
    C sum = 0;
    for (std::int64_t j = lane; j < inner.numel; j += kWarp) {
      std::int64_t at[3];
      offsets(inner, j, at);
      sum += widen(a[base[1] + at[0]]) * widen(b[base[2] + at[1]]) * widen(c[base[3] + at[2]]);
    }
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) out[base[0]] = narrow<T>(sum);
  }
}

}  // namespace

int distances(const Distances& d, Stream stream) {
  const std::int64_t row_tiles = (d.rows + kTile - 1) / kTile, column_tiles = (d.columns + kTile - 1) / kTile;
  const std::int64_t tiles = d.batch * row_tiles * column_tiles;
  if (tiles == 0) return 0;
  const auto run = [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto* kernel) -> int {
      kernel<<<blocks_for(tiles, 1), kThreads, 0, stream>>>(
          tiles, row_tiles, column_tiles, d.rows, d.columns, d.length, static_cast<T>(d.p), d.condensed,
          static_cast<const T*>(d.left), static_cast<const T*>(d.right), static_cast<T*>(d.out));
      return cudaGetLastError();
    };
    if (d.p == 0) return launch(&tiled<Norm::kZero, T>);
    if (d.p == 1) return launch(&tiled<Norm::kOne, T>);
    if (d.p == 2) return launch(&tiled<Norm::kTwo, T>);
    if (d.p == static_cast<double>(INFINITY)) return launch(&tiled<Norm::kInfinity, T>);
    return launch(&tiled<Norm::kAny, T>);
  };
  if (d.dtype == DType::kFloat32) return run(Type<float>{});
  if (d.dtype == DType::kFloat64) return run(Type<double>{});
  return kNoKernel;
}

int trilinear(const Trilinear& p, Stream stream) {
  if (p.outer.numel == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    trilinear_sum<T><<<blocks_for(p.outer.numel, kThreads / kWarp), kThreads, 0, stream>>>(
        p.outer, p.inner, static_cast<const T*>(p.a), static_cast<const T*>(p.b), static_cast<const T*>(p.c),
        static_cast<T*>(p.out));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
