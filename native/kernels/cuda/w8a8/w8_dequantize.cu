// 8-bit weights times their scales as a dense matrix, for cuBLASLt on GPUs without a GEMM of these types.
//
// A thread has 16 weights of an output. Bytes: 1 a weight read, 2 written (4 of float32).
#include "kernels/cuda/w8a8/w8_values.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kLaneK = 16;

template <class T, class W>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(W8Gemm p, std::int64_t n0, std::int64_t pieces, T* __restrict__ to) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads, of_row = p.k / kLaneK;
  const auto* const weight = static_cast<const std::uint8_t*>(p.weight) + n0 * p.k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pieces; i += step) {
    const std::int64_t n = n0 + i / of_row, k = i % of_row * kLaneK;
    const float scale =
        p.scales_row == 0 ? p.scales[n] : p.scales[n / kW8ScaleBlock * p.scales_row + k / kW8ScaleBlock];
    const uint4 w = reinterpret_cast<const uint4*>(weight)[i];
    const std::uint32_t words[4] = {w.x, w.y, w.z, w.w};
    T values[kLaneK];
#pragma unroll
    for (int j = 0; j < kLaneK; ++j) {
      values[j] = narrow<T>(weight_value<W>(words[j / 4] >> 8 * (j % 4) & 0xffu) * scale);
    }
    auto* const out = reinterpret_cast<uint4*>(to + i * kLaneK);
#pragma unroll
    for (int j = 0; j < static_cast<int>(kLaneK * sizeof(T) / 16); ++j) {
      uint4 word;
      memcpy(&word, values + j * (16 / sizeof(T)), 16);
      out[j] = word;
    }
  }
}

}  // namespace

int w8_dequantize(const W8Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream) {
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (std::is_same_v<T, double>) {
      return kNoKernel;
    } else {
      return dispatch_weight(p.weight_dtype, [&](auto weight) -> int {
        const std::int64_t pieces = n * p.k / kLaneK;
        dequantize_kernel<T, decltype(weight)>
            <<<blocks_for(pieces, kThreads), kThreads, 0, stream>>>(p, n0, pieces, static_cast<T*>(to));
        return cudaGetLastError();
      });
    }
  });
}

}  // namespace untorch::kernels::cuda
