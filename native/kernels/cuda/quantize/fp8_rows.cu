// Rows in float8_e4m3fn with a scale each.
//
// A thread block makes a row: its largest size first, then the row again, from the first-level cache, in E4M3. Bytes: 2
// an element read (4 of float32), 1 written; the second reading is not of memory. Operations: about 15 instructions an
// element. Not measured yet.
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/quantize/row_absmax.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
__device__ __forceinline__ void make_row(const Float8Rows& p, std::int64_t m) {
  const T* const from = static_cast<const T*>(p.x) + m * p.row;
  auto* const to = static_cast<std::uint8_t*>(p.to) + m * p.to_width;
  const RowSize found = row_size(from, p.width);
  const float by = kE4m3Max / found.size;
  if (threadIdx.x == 0) p.scales[m] = found.finite ? found.size / kE4m3Max : __uint_as_float(0x7fc00000u);
  const std::int64_t first = std::int64_t{threadIdx.x} * kStep, step = std::int64_t{kThreads} * kStep;
  for (std::int64_t k = first; k < p.to_width; k += step) {
    uint2 bytes{0, 0};
    if (k < p.width) {
      float values[kStep];
      load_step(from + k, values);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        bytes.x |= e4m3_of(values[i] * by) << 8 * i;
        bytes.y |= e4m3_of(values[4 + i] * by) << 8 * i;
      }
    }
    *reinterpret_cast<uint2*>(to + k) = bytes;
  }
}

// The first blocks make rows, those behind them the factors of columns.
template <class T>
__global__ void __launch_bounds__(kThreads) make_rows(Float8Rows p, std::int64_t row_blocks) {
  if (blockIdx.x < row_blocks) {
    for (std::int64_t m = blockIdx.x; m < p.m; m += row_blocks) make_row<T>(p, m);
    return;
  }
  const std::int64_t step = (std::int64_t{gridDim.x} - row_blocks) * kThreads;
  for (std::int64_t i = (blockIdx.x - row_blocks) * kThreads + threadIdx.x; i < p.n; i += step) {
    p.columns[i] = p.factors[p.one_factor ? 0 : i] * p.by;
  }
}

}  // namespace

int float8_rows(const Float8Rows& p, Stream stream) {
  constexpr std::int64_t kMostBlocks = 1 << 30;
  const std::int64_t rows = p.m < kMostBlocks ? p.m : kMostBlocks;
  const std::int64_t blocks = rows + (p.n + kThreads - 1) / kThreads;
  if (blocks == 0) return 0;
  if (blocks > 0x7fffffff) return kNoKernel;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      make_rows<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p, rows);
      return cudaGetLastError();
    }
  });
}

}  // namespace untorch::kernels::cuda
