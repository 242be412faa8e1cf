// Fused MoE with int4 weights: the grouped GEMMs between moe_route and moe_sum.
//
// The rows of all experts lie below each other and are packed like one weight, in w4a16/problem.h's layout with
// inner_k_tiles 8: 8 rows × 128 k are 512 contiguous bytes in the order of the mma fragments, so that x and act keep
// the order of k.
#pragma once

#include "kernels/cuda/moe/w4a16_moe.h"

namespace untorch::kernels::cuda {

// w = (q - 8) · scale + zero, rounded to x's dtype.
struct Int4Moe : W4A16Moe {
  static constexpr bool kPermutesK = false;
  static constexpr DeviceFault kIdFault = DeviceFault::kInt4Expert;

  // [experts · 2·intermediate, w13_k] and [experts · k, w2_k]; 16-byte aligned.
  const void *w13 = nullptr, *w2 = nullptr;
  // Of p.dtype, [w13_k / group][experts · 2·intermediate][2] and [w2_k / group][experts · k][2]: scale, zero; 16-byte
  // aligned.
  const void *w13_scales = nullptr, *w2_scales = nullptr;
  std::int64_t w13_k = 0, w2_k = 0;  // at least k and intermediate; multiples of the group and of 128
  std::int64_t group = 128;          // 32, 64, 128 or 256

  std::int64_t padded_k() const { return w13_k; }
  std::int64_t padded_intermediate() const { return w2_k; }
};

// act, rounded to x's dtype.
int int4_moe_gate_up(const Int4Moe& p, Stream stream);
// pair_out[pair] = topk_weights[pair] · (w2 · act + w2_bias).
int int4_moe_down(const Int4Moe& p, Stream stream);

// The kernels that those two choose for float32, and for tile_m kMoeSm90TileM.
int int4_moe_gate_up_float32(const Int4Moe& p, Stream stream);
int int4_moe_down_float32(const Int4Moe& p, Stream stream);
int int4_moe_gate_up_sm90(const Int4Moe& p, Stream stream);
int int4_moe_down_sm90(const Int4Moe& p, Stream stream);

}  // namespace untorch::kernels::cuda
