// What products with packed weights do before and behind their kernels: rows with zeros behind them, and sums of parts.
#include "kernels/cuda/w4a16/tile_sm80.cuh"

namespace untorch::kernels::cuda {
namespace {

// Adds up what the parts left in the workspace, [part][m][n].
template <class T>
__global__ void __launch_bounds__(kThreads) add_parts(W4A16Gemm p, int parts) {
  const std::int64_t pairs = p.m * p.n / 2, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += step) {
    float2 sum{0.0f, 0.0f};
    for (int r = 0; r < parts; ++r) {
      const float2 part = reinterpret_cast<const float2*>(p.workspace)[r * pairs + i];
      sum.x += part.x, sum.y += part.y;
    }
    store_pair<T>(p, 2 * i / p.n, 2 * i % p.n, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    pad_rows(const std::uint16_t* __restrict__ x, std::int64_t numel, std::int64_t width, std::int64_t row,
             std::uint16_t* __restrict__ to, std::int64_t to_width) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const std::int64_t m = i / to_width, k = i - m * to_width;
    to[i] = k < width ? x[m * row + k] : std::uint16_t{0};
  }
}

}  // namespace

int w4a16_reduce_split_k(const W4A16Gemm& p, int parts, Stream stream) {
  const unsigned blocks = blocks_for(p.m * p.n / 2, kThreads);
  if (p.dtype == DType::kFloat16) {
    add_parts<__half><<<blocks, kThreads, 0, stream>>>(p, parts);
  } else {
    add_parts<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p, parts);
  }
  return cudaGetLastError();
}

int w4a16_pad_activations(const void* x, std::int64_t m, std::int64_t width, std::int64_t row, void* to,
                    std::int64_t to_width, Stream stream) {
  const std::int64_t numel = m * to_width;
  if (numel == 0) return 0;
  pad_rows<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(static_cast<const std::uint16_t*>(x), numel, width,
                                                                 row, static_cast<std::uint16_t*>(to), to_width);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
