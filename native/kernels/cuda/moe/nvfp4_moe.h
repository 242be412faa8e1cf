// Fused MoE with NVFP4 weights: the grouped GEMMs between moe_route and moe_sum.
//
// float16 and bfloat16 use tensor cores. Weights are row-major: a lane has 16 contiguous k of a weight row in 8 bytes,
// one scale block. The k of an mma fragment are those of a word's nibbles p and p + 4, of the 64 k that four lanes
// have; x and act are stored in that order (permuted_k), so that no weight is shuffled.
#pragma once

#include "kernels/cuda/moe/w4a16_moe.h"

namespace untorch::kernels::cuda {

struct Nvfp4Moe : W4A16Moe {  // intermediate: a multiple of 16
  static constexpr bool kPermutesK = true;
  static constexpr DeviceFault kIdFault = DeviceFault::kNvfp4Expert;

  // Dense [experts, 2·intermediate, k/2] and [experts, k, intermediate/2], the even k in the lower half; their scales,
  // E4M3, a sixteenth as wide as k. 16-byte aligned.
  const std::uint8_t *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
  const float *w13_global = nullptr, *w2_global = nullptr;  // [experts]; w13's [experts, 2] with two_scales
  bool two_scales = false;

  std::int64_t padded_k() const { return (k + kMoeKGroup - 1) / kMoeKGroup * kMoeKGroup; }
  std::int64_t padded_intermediate() const { return (intermediate + kMoeKGroup - 1) / kMoeKGroup * kMoeKGroup; }
};

// act, rounded to x's dtype.
int nvfp4_moe_gate_up(const Nvfp4Moe& p, Stream stream);
// pair_out[pair] = topk_weights[pair] · (w2 · act + w2_bias).
int nvfp4_moe_down(const Nvfp4Moe& p, Stream stream);

// The kernels that those two choose for float32, and for tile_m kMoeSm90TileM.
int nvfp4_moe_gate_up_float32(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_float32(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_gate_up_sm90(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_sm90(const Nvfp4Moe& p, Stream stream);

}  // namespace untorch::kernels::cuda
