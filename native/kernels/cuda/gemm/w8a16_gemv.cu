// W8A16 GEMV: a warp per output column, up to eight rows of x at once; and the per-column scale of a cuBLASLt GEMM.
//
//   weight [n, k] int8   lane t reads bytes 4 t … 4 t + 3 of every 128 of its column: coalesced, read once per 8 rows
//   x [m, k]             from L1/L2;  FP32 sums, warp shuffle, scale, out [m, n]
//
// Roofline: memory, n k bytes of weights for every eight rows. Share of the roofline: not measured alone.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/gemm.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;

// CTAs are numbered rows by kRows, then columns by kWarps, the columns quickest. `by_four`: k is a multiple of 4 and
// the weights are aligned to it.
template <class T, int kRows>
__global__ void __launch_bounds__(kThreads)
    multiply_rows(std::int64_t tiles, std::int64_t column_tiles, std::int64_t m, std::int64_t n, std::int64_t k,
                  bool by_four, const T* __restrict__ x, const std::int8_t* __restrict__ weight,
                  const T* __restrict__ scales, T* __restrict__ out) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t i0 = tile / column_tiles * kRows, j = tile % column_tiles * kWarps + threadIdx.x / kWarp;
    if (j >= n) continue;  // the whole warp agrees
    const std::int8_t* const row = weight + j * k;
    float sum[kRows] = {};
    // Rows past the end read the last one and are not written.
    const T* from[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) from[r] = x + (i0 + r < m ? i0 + r : m - 1) * k;
    if (by_four) {
      for (std::int64_t c = lane * 4; c < k; c += kWarp * 4) {
        const char4 w = *reinterpret_cast<const char4*>(row + c);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sum[r] += widen(from[r][c]) * static_cast<float>(w.x);
          sum[r] += widen(from[r][c + 1]) * static_cast<float>(w.y);
          sum[r] += widen(from[r][c + 2]) * static_cast<float>(w.z);
          sum[r] += widen(from[r][c + 3]) * static_cast<float>(w.w);
        }
      }
    } else {
      for (std::int64_t c = lane; c < k; c += kWarp) {
        const auto w = static_cast<float>(row[c]);
#pragma unroll
        for (int r = 0; r < kRows; ++r) sum[r] += widen(from[r][c]) * w;
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int offset = kWarp / 2; offset > 0; offset /= 2) sum[r] += __shfl_xor_sync(0xffffffffu, sum[r], offset);
      if (lane == 0 && i0 + r < m) out[(i0 + r) * n + j] = narrow<T>(sum[r] * widen(scales[j]));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    multiply_columns(std::int64_t numel, std::int64_t n, const float* __restrict__ sums, const T* __restrict__ scales,
                     T* __restrict__ out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    out[i] = narrow<T>(sums[i] * widen(scales[i % n]));
  }
}

}  // namespace

int w8a16_gemv(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, const void* x, const void* weight,
               const void* scales, void* out, Stream stream) {
  if (m * n == 0) return 0;
  const bool by_four = k % 4 == 0 && reinterpret_cast<std::uintptr_t>(weight) % 4 == 0;
  const std::int64_t column_tiles = (n + kWarps - 1) / kWarps;
  return dispatch_up_to_float32(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto launch = [&](auto* kernel, int rows) -> int {
      const std::int64_t tiles = (m + rows - 1) / rows * column_tiles;
      kernel<<<blocks_for(tiles, 1), kThreads, 0, stream>>>(
          tiles, column_tiles, m, n, k, by_four, static_cast<const T*>(x), static_cast<const std::int8_t*>(weight),
          static_cast<const T*>(scales), static_cast<T*>(out));
      return cudaGetLastError();
    };
    return m == 1 ? launch(&multiply_rows<T, 1>, 1) : launch(&multiply_rows<T, 8>, 8);
  });
}

int scale_columns(std::int64_t m, std::int64_t n, DType dtype, const float* sums, const void* scales, void* out,
                  Stream stream) {
  if (m * n == 0) return 0;
  return dispatch_up_to_float32(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    multiply_columns<T><<<blocks_for(m * n, kThreads), kThreads, 0, stream>>>(
        m * n, n, sums, static_cast<const T*>(scales), static_cast<T*>(out));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
