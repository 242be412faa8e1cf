// What the products of a mixture of experts share: copies of weights, a word of codes as operands, the gate.
#pragma once

#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"

namespace untorch::kernels::cuda {

// 16 bytes of a weight from global to shared memory, or zeros for `bytes` 0; the 128 around them to the second-level
// cache, since the next stages read them.
__device__ __forceinline__ void copy_line(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_eight(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Which k lies at a place of 64: lane t = k / 16 has word k / 8 % 2 of them, whose nibble p is in the half p / 4 of
// pair p % 4, and two pairs are a lane's for one instruction.
__host__ __device__ constexpr int arranged_k(int place) {
  return (place >> 1 & 3) << 4 | (place >> 5 & 1) << 3 | (place & 1) << 2 | (place >> 4 & 1) << 1 | (place >> 3 & 1);
}

// What is added, exclusively or, to a unit of 32 bytes of a line with so many units, so that lines lie apart.
template <int Units>
__device__ __forceinline__ int moe_turn(int line) {
  return (Units == 2 ? line >> 1 : line) & (Units - 1);
}

// The eight codes of a word times the prepared scale: nibble i and i + 4 in pairs[i].
template <class T>
__device__ __forceinline__ void unpack_codes(std::uint32_t word, std::uint32_t scale, std::uint32_t (&pairs)[4]) {
  using V = Nvfp4Values<T>;
  V::codes(word, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = V::product(pairs[i], scale);
}

// act of a gate and its up. All threads take the same branch.
__device__ __forceinline__ float gated(const SwiGlu& swiglu, float gate, float up) {
  const float alpha = swiglu.alpha, beta = swiglu.beta, limit = swiglu.limit;
  if (alpha == 1.0f && beta == 0.0f && limit == kNoLimit) return gate / (1.0f + expf(-gate)) * up;
  // Comparisons that NaN fails: it stays.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + expf(-alpha * gate)) * (up + beta);
}

}  // namespace untorch::kernels::cuda
