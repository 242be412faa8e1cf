// Shared by the NVFP4 MoE kernels: weight loads, a word of codes to fragments, SwiGLU.
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"

namespace untorch::kernels::cuda {

// cp.async of 16 bytes, or zeros for `bytes` 0, which prefetches the 128 around them to L2: the next stages read them.
__device__ __forceinline__ void cp_async_16_l2_128(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The k of 64 at a position of a permuted row: lane t = k / 16 has word k / 8 % 2, whose nibble p is in half p / 4 of
// pair p % 4; two pairs are a lane's for one mma.m16n8k16.
__host__ __device__ constexpr int permuted_k(int position) {
  return (position >> 1 & 3) << 4 | (position >> 5 & 1) << 3 | (position & 1) << 2 | (position >> 4 & 1) << 1 |
         (position >> 3 & 1);
}

// The XOR swizzle of a weight row's units of 32 bytes.
template <int Units>
__device__ __forceinline__ int moe_swizzle(int weight_row) {
  return (Units == 2 ? weight_row >> 1 : weight_row) & (Units - 1);
}

// Dequantizes a word with a prepared scale: nibbles i and i + 4 to pairs[i].
template <class T>
__device__ __forceinline__ void dequantize_pairs(std::uint32_t word, std::uint32_t scale, std::uint32_t (&pairs)[4]) {
  using V = Nvfp4Values<T>;
  V::codes(word, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = V::product(pairs[i], scale);
}

// SwiGLU of a gate and its up. The branch is uniform.
__device__ __forceinline__ float swiglu(const SwiGlu& params, float gate, float up) {
  const float alpha = params.alpha, beta = params.beta, limit = params.limit;
  if (alpha == 1.0f && beta == 0.0f && limit == kNoLimit) return gate / (1.0f + expf(-gate)) * up;
  // NaN fails the comparisons, and stays.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + expf(-alpha * gate)) * (up + beta);
}

}  // namespace untorch::kernels::cuda
