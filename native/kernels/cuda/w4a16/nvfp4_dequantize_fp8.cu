// Dequantizes NVFP4 weights to float8_e4m3fn without the global scale, from tiles (dequantize.cuh) or from bytes: the
// weight of a W8A8 GEMM by cuBLASLt.
//
// Bytes: 0.5625 a weight read, 1 written. Operations: about 9 instructions a weight, a third of them for rounding; on
// an H200 that takes a little less time than the bytes do from memory. The share that is reached has not been measured
// yet.
#include "kernels/cuda/quantize/fp8_rows.h"
#include "kernels/cuda/w4a16/dequantize.cuh"
#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"

namespace untorch::kernels::cuda {
namespace {

using Exact = Nvfp4Values<__half>;

// Exact::scale_pair_of for code · scale times 2^-11: 2^-kNvfp4Fp8Shift, so that the largest is an E4M3 value, and 2^-8
// for e4m3_pair_of.
__device__ __forceinline__ std::uint32_t fp8_scale_pair_of(std::uint32_t bytes) {
  static_assert(kNvfp4Fp8Shift == 3);
  const std::uint32_t sign = bytes << 8 & Exact::kSign;
  return Exact::product(bytes << 7 & 0x3f803f80u | sign, 0x68006800u);  // e4m3·2^-8; by 2^14 for codes and 2^-3
}

class Nvfp4DequantizeFp8 {
 public:
  using Gemm = Nvfp4Gemm;
  __device__ __forceinline__ explicit Nvfp4DequantizeFp8(const Nvfp4Gemm& p) : p_(p) {}

  template <class T>
  __device__ __forceinline__ void dequantize(int k, std::int64_t column, std::uint32_t word,
                                             PairOf<T> (&pairs)[4]) const {
    const std::uint32_t two = __ldg(reinterpret_cast<const unsigned short*>(static_cast<const char*>(p_.block_scales) +
                                                                            column * (p_.k / 16) + k / 16));
    const std::uint32_t scales = fp8_scale_pair_of(two | two << 8);
    Exact::codes(word, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      pairs[p] = e4m3_pair_of(p < 2 ? Exact::times_lower(pairs[p], scales) : Exact::times_upper(pairs[p], scales));
    }
  }

 private:
  const Nvfp4Gemm& p_;
};

// A thread dequantizes the 16 weights of a block scale.
__global__ void __launch_bounds__(kThreads)
    fp8_from_bytes_kernel(Nvfp4Gemm p, std::int64_t n0, std::int64_t blocks, uint4* __restrict__ to) {
  const std::int64_t from = n0 * (p.k / 16), step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < blocks; i += step) {
    const uint2 codes = __ldg(static_cast<const uint2*>(p.weight) + from + i);
    const std::uint32_t byte = __ldg(static_cast<const unsigned char*>(p.block_scales) + from + i);
    const std::uint32_t scales = fp8_scale_pair_of(byte | byte << 16);
    std::uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const std::uint32_t four = (q < 2 ? codes.x : codes.y) >> (q % 2 * 16);
      const std::uint32_t low = Exact::pair<0>(four & 0x0fu | four << 12 & 0x000f0000u, scales);
      const std::uint32_t high = Exact::pair<0>(four >> 8 & 0x0fu | four << 4 & 0x000f0000u, scales);
      words[q] = __byte_perm(e4m3_pair_of(low), e4m3_pair_of(high), 0x7531);
    }
    to[i] = uint4{words[0], words[1], words[2], words[3]};
  }
}

}  // namespace

int nvfp4_dequantize_fp8(const Nvfp4Gemm& p, std::int64_t n0, std::int64_t n, void* to, Stream stream) {
  if (p.inner_k_tiles != 0) {
    return dequantize_tiles_as<Nvfp4DequantizeFp8>(p, n0, n, static_cast<std::uint8_t*>(to), stream);
  }
  const std::int64_t blocks = n * (p.k / 16);
  if (blocks == 0) return 0;
  fp8_from_bytes_kernel<<<blocks_for(blocks, kThreads), kThreads, 0, stream>>>(p, n0, blocks, static_cast<uint4*>(to));
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
