// Shared by the MoE GEMMs' weight formats (nvfp4_format.cuh, int4_format.cuh): which rows of an expert a tile has.
//
// A Format has
//   Moe             the problem: Nvfp4Moe or Int4Moe
//   WeightLoader    a thread's cp.async loads of a stage's weight and scales
//   Rows            a lane's words of a weight row in a stage, dequantized to mma fragments
//   kScaleBytes     of a weight row and 64 k, in a stage
//   kHasGlobalScale the epilogue applies gate_up_scales and down_scale to accumulators
//   dot_weight_row  for the kernel without tensor cores
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/moe/w4a16_moe.h"

namespace untorch::kernels::cuda {

// cp.async of 16 bytes, or zeros for `bytes` 0, which prefetches the 128 around them to L2: the next stages read them.
__device__ __forceinline__ void cp_async_16_l2_128(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// The k of 64 at a position of a row where k is permuted: lane t = k / 16 has word k / 8 % 2, whose nibble p is in half
// p / 4 of pair p % 4; two pairs are a lane's for one mma.m16n8k16.
__host__ __device__ constexpr int permuted_k(int position) {
  return (position >> 1 & 3) << 4 | (position >> 5 & 1) << 3 | (position & 1) << 2 | (position >> 4 & 1) << 1 |
         (position >> 3 & 1);
}

// The weight of gate_up (w13) or down (w2).
template <bool GateUp>
struct MoeWeight {
  // An expert's matrix is [num_rows, k].
  __device__ static std::int64_t num_rows(const W4A16Moe& p) { return GateUp ? 2 * p.intermediate : p.k; }
  // The weight's row that is row `row` of the tile with first output column n0; -1: out of bounds.
  __device__ static __forceinline__ std::int64_t weight_row(const W4A16Moe& p, int n0, int row) {
    if constexpr (GateUp) {
      const int at = n0 + row / 16 * 8 + row % 8;
      return at < p.intermediate ? at + (row & 8 ? p.intermediate : 0) : -1;
    } else {
      return n0 + row < p.k ? n0 + row : -1;
    }
  }
};

// What is in bounds of a thread's loads, in one register; codes and x are shifted by the copy.
inline constexpr unsigned kHasScales = 1, kHasCodes = 2, kHasX = 8;

}  // namespace untorch::kernels::cuda
