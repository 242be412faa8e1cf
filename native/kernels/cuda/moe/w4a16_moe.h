// Fused MoE with weights in four bits (W4A16): routing, two grouped GEMMs, combine. What int4 and NVFP4 share. A pair
// is a token and one of its experts.
//
//   moe_route          sorts pairs by expert, cuts them into tiles of up to tile_m rows of one expert; copies x
//   ..._moe_gate_up    grouped GEMM with w13 and SwiGLU: act [pairs, intermediate]
//   ..._moe_down       grouped GEMM with w2, times the router weight: pair_out [pairs, k], float32
//   moe_sum            out [token] = the sum of pair_out over top_k, in its order
//
// Nothing is read back to the host: grids are as large as the shapes allow, and CTAs of tiles without rows exit at
// once. With PDL the kernels behind moe_route start early and wait for the end of the one before: only launches
// overlap. moe_route starts as ever: one token took 24 µs instead of 20 where a whole layer's kernels could start
// early.
#pragma once

#include <cstddef>
#include <limits>

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// A tile in M: the pairs sorted_pairs[begin] to sorted_pairs[begin + rows - 1] of one expert. An empty one: expert -1.
struct ExpertTile {
  int expert, begin, rows, unused;
};

inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g), g = min(gate, limit).
struct SwiGlu {
  float alpha = 1.0f, beta = 0.0f, limit = kNoLimit;
};

struct W4A16Moe {
  DType dtype = DType::kBFloat16;  // of x and out: bfloat16, float16 or float32
  std::int64_t tokens = 0, k = 0, experts = 0, intermediate = 0, top_k = 0;  // k a multiple of 16, intermediate of 8
  const void* x = nullptr;                                                   // [tokens, k], rows x_stride apart
  std::int64_t x_stride = 0;
  const float* topk_weights = nullptr;     // dense [tokens, top_k]
  const std::int32_t* topk_ids = nullptr;  // the same; pairs of no expert (-1) add nothing
  const float *w13_bias = nullptr,
              *w2_bias = nullptr;  // null, or dense [experts, 2·intermediate], [experts, k]; w2's aligned
  SwiGlu swiglu;
  void* out = nullptr;     // dense [tokens, k]
  bool has_wgmma = false;  // sm_90 alone
  bool pdl = false;        // launch with programmatic stream serialization: Launch::pdl

  // As moe_plan sets them.
  int tile_m = 8;                                    // rows of a tile, at most
  std::int64_t num_tiles = 0;                        // upper bound
  std::int64_t copied_stride = 0, act_stride = 0;    // elements: padded with zeros, but for float32
  bool permutes_k = false;                           // of copied_x and act: permuted_k
  DeviceFault id_fault = DeviceFault::kNvfp4Expert;  // of ids that are no experts

  // The workspace, 16-byte aligned, of the bytes that moe_workspace returns.
  int* sorted_pairs = nullptr;  // [pairs], by expert; those of no expert are left out
  ExpertTile* tiles = nullptr;  // [num_tiles]
  void* copied_x = nullptr;     // [tokens, copied_stride]; not for float32
  void* act = nullptr;          // [pairs, act_stride], by position in sorted_pairs
  float* pair_out = nullptr;    // [pairs, k]
  FaultWord* fault = nullptr;   // of the device

  std::int64_t pairs() const { return tokens * top_k; }
};

// K of a part of a stage: strides of x and act are multiples of it, and NVFP4 permutes k within it.
inline constexpr int kMoeKGroup = 64;

// Pairs that one launch takes; and bytes of pair_out that tokens are chunked for.
inline constexpr std::int64_t kMoeMaxPairs = std::int64_t{1} << 30, kMoeChunkBytes = std::int64_t{256} << 20;

// tile_m of the sm_90 GEMM.
inline constexpr int kMoeSm90TileM = 160;

// The mean M of an expert up to which tile_m is 8, 16 and 32; above it is 64, or kMoeSm90TileM where the GPU has
// WGMMA. max_mean_sm80 is measured by benchmarks/gpu_nvfp4_moe.py, whose --sm80-mean overrides it for a run.
struct MoeThresholds {
  std::int64_t max_mean_m8 = 2, max_mean_m16 = 8, max_mean_m32 = 24, max_mean_sm80 = 24;
};

// Sets tile_m, num_tiles, strides and what the format says, Nvfp4Moe or Int4Moe. Large tiles read weights once; rows
// that pad a tile cost tensor-core time. Each expert has at most one tile that is not full.
template <class Moe>
void moe_plan(Moe& p, const MoeThresholds& thresholds = {}) {
  const bool is_half = p.dtype != DType::kFloat32;
  p.copied_stride = is_half ? p.padded_k() : p.k, p.act_stride = is_half ? p.padded_intermediate() : p.intermediate;
  p.permutes_k = Moe::kPermutesK, p.id_fault = Moe::kIdFault;
  const std::int64_t mean = p.experts == 0 ? 0 : p.pairs() / p.experts;
  if (is_half && p.has_wgmma && mean > thresholds.max_mean_sm80) {
    p.tile_m = kMoeSm90TileM;
  } else {
    p.tile_m = !is_half || mean <= thresholds.max_mean_m8 ? 8
               : mean <= thresholds.max_mean_m16          ? 16
               : mean <= thresholds.max_mean_m32          ? 32
                                                          : 64;
  }
  const std::int64_t max_tiles = p.pairs() / p.tile_m + p.experts;
  p.num_tiles = p.experts == 0 ? 0 : max_tiles < p.pairs() ? max_tiles : p.pairs();
}

// Bytes of the workspace.
struct MoeWorkspace {
  std::size_t sorted_pairs = 0, tiles = 0, copied_x = 0, act = 0, pair_out = 0;
};
inline MoeWorkspace moe_workspace(const W4A16Moe& p) {
  const bool is_half = p.dtype != DType::kFloat32;
  MoeWorkspace out;
  out.sorted_pairs = static_cast<std::size_t>(p.pairs()) * sizeof(int);
  out.tiles = static_cast<std::size_t>(p.num_tiles) * sizeof(ExpertTile);
  out.copied_x = is_half ? static_cast<std::size_t>(2 * p.tokens * p.copied_stride) : 0;
  out.act = static_cast<std::size_t>(p.pairs() * p.act_stride * (is_half ? 2 : 4));
  out.pair_out = static_cast<std::size_t>(p.pairs() * p.k) * sizeof(float);
  return out;
}

// Fills sorted_pairs, tiles and copied_x; reports ids that are no experts.
int moe_route(const W4A16Moe& p, Stream stream);
// out[token] = the sum of pair_out over its pairs.
int moe_sum(const W4A16Moe& p, Stream stream);

}  // namespace untorch::kernels::cuda
