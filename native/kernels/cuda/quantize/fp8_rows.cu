// Dynamic per-row (per-token) quantization of activations to FP8 E4M3.
//
// A CTA has a row, or with few rows a part of one: absmax first, then the row again, from L1, scaled and rounded.
// Bytes: 2 an element read (4 of float32), 1 written; the second read is not of memory. The share of the roofline has
// not been measured yet.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/quantize/e4m3_convert.cuh"
#include "kernels/cuda/quantize/row_absmax.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
__device__ __forceinline__ void quantize_row(const Fp8Rows& p, std::int64_t m) {
  const T* const from = static_cast<const T*>(p.x) + m * p.row;
  auto* const to = static_cast<std::uint8_t*>(p.to) + m * p.to_width;
  const RowAbsMax found = row_absmax(from, p.width);
  const float inv_scale = kE4m3Max / found.absmax;
  if (threadIdx.x == 0 && blockIdx.y == 0)
    p.scales[m] = found.finite ? found.absmax / kE4m3Max : __uint_as_float(0x7fc00000u);
  const std::int64_t thread = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  for (std::int64_t k = thread * kStep; k < p.to_width; k += std::int64_t{gridDim.y} * kThreads * kStep) {
    uint2 bytes{0, 0};
    if (k < p.width) {
      float values[kStep];
      load_step(from + k, values);
      bytes = e4m3_of_eight(values, inv_scale);
    }
    *reinterpret_cast<uint2*>(to + k) = bytes;
  }
}

// The first CTAs quantize rows, those behind them scale the column factors.
template <class T>
__global__ void __launch_bounds__(kThreads) quantize_rows_kernel(Fp8Rows p, std::int64_t row_ctas) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  if (blockIdx.x < row_ctas) {
    for (std::int64_t m = blockIdx.x; m < p.m; m += row_ctas) quantize_row<T>(p, m);
    return;
  }
  if (blockIdx.y > 0) return;
  const std::int64_t step = (std::int64_t{gridDim.x} - row_ctas) * kThreads;
  for (std::int64_t i = (blockIdx.x - row_ctas) * kThreads + threadIdx.x; i < p.n; i += step) {
    p.columns[i] = p.factors[p.one_factor ? 0 : i] * p.by;
  }
}

}  // namespace

int quantize_rows_fp8(const Fp8Rows& p, Stream stream) {
  constexpr std::int64_t kMaxCtas = 1 << 30;
  const std::int64_t rows = p.m < kMaxCtas ? p.m : kMaxCtas;
  const std::int64_t ctas = rows + (p.n + kThreads - 1) / kThreads;
  if (ctas == 0) return 0;
  if (ctas > 0x7fffffff) return kNoKernel;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      Launch how;
      how.blocks = dim3(static_cast<unsigned>(ctas), p.m > 0 ? parts_of_row(p.m, p.to_width) : 1);
      how.threads = kThreads;
      how.pdl = p.pdl;
      return launch_kernel(quantize_rows_kernel<T>, how, stream, p, rows);
    }
  });
}

}  // namespace untorch::kernels::cuda
