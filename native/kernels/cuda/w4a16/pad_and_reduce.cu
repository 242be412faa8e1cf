// Around the W4A16 GEMM: padding of activations along K, and the split-K reduction. Elementwise, memory-bound.
#include "kernels/cuda/w4a16/tile_sm80.cuh"

namespace untorch::kernels::cuda {
namespace {

// workspace: [split][m][n].
template <class T>
__global__ void __launch_bounds__(kThreads) reduce_split_k_kernel(W4A16Gemm p, int splits) {
  const std::int64_t pairs = p.m * p.n / 2, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += step) {
    float2 sum{0.0f, 0.0f};
    for (int r = 0; r < splits; ++r) {
      const float2 partial = reinterpret_cast<const float2*>(p.workspace)[r * pairs + i];
      sum.x += partial.x, sum.y += partial.y;
    }
    store_pair<T>(p, 2 * i / p.n, 2 * i % p.n, sum);
  }
}

__global__ void __launch_bounds__(kThreads)
    pad_activations_kernel(const std::uint16_t* __restrict__ x, std::int64_t numel, std::int64_t width,
                           std::int64_t stride, std::uint16_t* __restrict__ padded, std::int64_t padded_width) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    const std::int64_t m = i / padded_width, k = i - m * padded_width;
    padded[i] = k < width ? x[m * stride + k] : std::uint16_t{0};
  }
}

}  // namespace

int w4a16_reduce_split_k(const W4A16Gemm& p, int splits, Stream stream) {
  const unsigned blocks = blocks_for(p.m * p.n / 2, kThreads);
  if (p.dtype == DType::kFloat16) {
    reduce_split_k_kernel<__half><<<blocks, kThreads, 0, stream>>>(p, splits);
  } else {
    reduce_split_k_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p, splits);
  }
  return cudaGetLastError();
}

int w4a16_pad_activations(const void* x, std::int64_t m, std::int64_t width, std::int64_t stride, void* padded,
                          std::int64_t padded_width, Stream stream) {
  const std::int64_t numel = m * padded_width;
  if (numel == 0) return 0;
  pad_activations_kernel<<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(
      static_cast<const std::uint16_t*>(x), numel, width, stride, static_cast<std::uint16_t*>(padded), padded_width);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
