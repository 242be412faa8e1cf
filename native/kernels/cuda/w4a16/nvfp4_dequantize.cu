// Dequantizes NVFP4 weights to a dense matrix, from tiles (dequantize.cuh) or from bytes.
//
// From bytes, a thread dequantizes the 16 weights of a block scale: 8 bytes read, 32 or 64 written, coalesced over the
// warp. Bytes: 0.5625 a weight read, 2 or 4 written.
#include "kernels/cuda/w4a16/dequantize.cuh"
#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"

namespace untorch::kernels::cuda {
namespace {

// Code · block scale is exact in float16, scaled by a power of two.
using Exact = Nvfp4Values<__half>;

__device__ __forceinline__ float global_scale(const Nvfp4Gemm& p, std::int64_t column) {
  return __ldg(p.global_scales + (p.row_scales ? column : 0)) * Exact::kUnshift;
}

template <class T>
__device__ __forceinline__ PairOf<T> finished(std::uint32_t pair, float scale) {
  const float2 exact = __half22float2(pair_of_bits<__half>(pair));
  const float2 values{exact.x * scale, exact.y * scale};
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    const T two[2] = {narrow<T>(values.x), narrow<T>(values.y)};
    std::uint32_t bits;
    memcpy(&bits, two, 4);
    return bits;
  }
}

class Nvfp4Dequantize {
 public:
  using Gemm = Nvfp4Gemm;
  __device__ __forceinline__ explicit Nvfp4Dequantize(const Nvfp4Gemm& p) : p_(p) {}

  template <class T>
  __device__ __forceinline__ void dequantize(int k, std::int64_t column, std::uint32_t word,
                                             PairOf<T> (&pairs)[4]) const {
    // Two scales: of the 16 k of the first two pairs, and of the other 16.
    const std::uint32_t two = __ldg(reinterpret_cast<const unsigned short*>(static_cast<const char*>(p_.block_scales) +
                                                                            column * (p_.k / 16) + k / 16));
    const std::uint32_t scales = Exact::scale_pair_of(two | two << 8);
    const float global = global_scale(p_, column);
    std::uint32_t codes[4];
    Exact::codes(word, codes);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] =
          finished<T>(p < 2 ? Exact::times_lower(codes[p], scales) : Exact::times_upper(codes[p], scales), global);
    }
  }

 private:
  const Nvfp4Gemm& p_;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_bytes_kernel(Nvfp4Gemm p, std::int64_t n0, std::int64_t blocks, T* __restrict__ to) {
  const std::int64_t row_blocks = p.k / 16, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < blocks; i += step) {
    const std::int64_t column = n0 + i / row_blocks, at = n0 * row_blocks + i;
    const uint2 codes = __ldg(static_cast<const uint2*>(p.weight) + at);
    const std::uint32_t byte = __ldg(static_cast<const unsigned char*>(p.block_scales) + at);
    const std::uint32_t scales = Exact::scale_pair_of(byte | byte << 16);
    const float global = global_scale(p, column);
    PairOf<T> pairs[8];
#pragma unroll
    for (int q = 0; q < 8; ++q) {
      const std::uint32_t two = (q < 4 ? codes.x : codes.y) >> (q % 4 * 8);
      pairs[q] = finished<T>(Exact::pair<0>(two & 0x0fu | two << 12 & 0x000f0000u, scales), global);
    }
    auto* const row = reinterpret_cast<uint4*>(to + i * 16);
#pragma unroll
    for (int q = 0; q < static_cast<int>(sizeof(pairs) / 16); ++q) {
      uint4 chunk;
      memcpy(&chunk, reinterpret_cast<const char*>(pairs) + q * 16, 16);
      row[q] = chunk;
    }
  }
}

}  // namespace

int nvfp4_dequantize(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream) {
  if (p.inner_k_tiles != 0) return dequantize_tiles<Nvfp4Dequantize>(p, n0, n, to, stream);
  const std::int64_t blocks = n * (p.k / 16);
  if (blocks == 0) return 0;
  return dispatch_dequantized(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    dequantize_bytes_kernel<T>
        <<<blocks_for(blocks, kThreads), kThreads, 0, stream>>>(p, n0, blocks, static_cast<T*>(to));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
