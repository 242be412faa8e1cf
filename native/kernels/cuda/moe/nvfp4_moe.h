// Fused MoE with NVFP4 weights (W4A16): routing, two grouped GEMMs, combine. A pair is a token and one of its experts.
//
//   nvfp4_moe_route    sorts pairs by expert, cuts them into tiles of up to tile_m rows of one expert; permutes x
//   nvfp4_moe_gate_up  grouped GEMM with w13 and SwiGLU: act [pairs, intermediate]
//   nvfp4_moe_down     grouped GEMM with w2, times the router weight: pair_out [pairs, k], float32
//   nvfp4_moe_sum      out [token] = the sum of pair_out over top_k, in its order
//
// Nothing is read back to the host: grids are as large as the shapes allow, and CTAs of tiles without rows exit at
// once.
//
// float16 and bfloat16 use tensor cores. Weights are row-major: a lane has 16 contiguous k of a weight row in 8 bytes,
// one scale block. The k of an mma fragment are those of a word's nibbles p and p + 4, of the 64 k that four lanes
// have; x and act are stored in that order (permuted_k), so that no weight is shuffled.
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

struct Nvfp4Moe {
  DType dtype = DType::kBFloat16;  // of x and out: bfloat16, float16 or float32
  std::int64_t tokens = 0, k = 0, experts = 0, intermediate = 0, top_k = 0;  // k, intermediate: multiples of 16
  const void* x = nullptr;                                                   // [tokens, k], rows x_stride apart
  std::int64_t x_stride = 0;
  const float* topk_weights = nullptr;     // dense [tokens, top_k]
  const std::int32_t* topk_ids = nullptr;  // the same; pairs of no expert (-1) add nothing
  // Dense [experts, 2·intermediate, k/2] and [experts, k, intermediate/2], the even k in the lower half; their scales,
  // E4M3, a sixteenth as wide as k. 16-byte aligned.
  const std::uint8_t *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
  const float *w13_global = nullptr, *w2_global = nullptr;  // [experts]; w13's [experts, 2] with two_scales
  bool two_scales = false;
  const float *w13_bias = nullptr,
              *w2_bias = nullptr;  // null, or dense [experts, 2·intermediate], [experts, k]; w2's aligned
  SwiGlu swiglu;
  void* out = nullptr;     // dense [tokens, k]
  bool has_wgmma = false;  // sm_90 alone

  // As nvfp4_moe_plan sets them.
  int tile_m = 8;                                    // rows of a tile, at most
  std::int64_t num_tiles = 0;                        // upper bound
  std::int64_t permuted_stride = 0, act_stride = 0;  // elements: padded to multiples of 64 with zeros, but for float32

  // The workspace, 16-byte aligned, of the bytes that nvfp4_moe_workspace returns.
  int* sorted_pairs = nullptr;  // [pairs], by expert; those of no expert are left out
  ExpertTile* tiles = nullptr;  // [num_tiles]
  void* permuted_x = nullptr;   // [tokens, permuted_stride]; not for float32
  void* act = nullptr;          // [pairs, act_stride], by position in sorted_pairs
  float* pair_out = nullptr;    // [pairs, k]
  FaultWord* fault = nullptr;   // of the device

  std::int64_t pairs() const { return tokens * top_k; }
};

// k that are permuted among themselves.
inline constexpr int kMoeKGroup = 64;

// Pairs that one launch takes; and bytes of pair_out that tokens are chunked for.
inline constexpr std::int64_t kMoeMaxPairs = std::int64_t{1} << 30, kMoeChunkBytes = std::int64_t{256} << 20;

// tile_m of the sm_90 GEMM.
inline constexpr int kMoeSm90TileM = 160;

// The mean M of an expert up to which tile_m is 8, 16 and 32; above it is 64, or kMoeSm90TileM where the GPU has
// WGMMA. max_mean_sm80 is measured by benchmarks/gpu_nvfp4_moe.py, whose --sm80-mean overrides it for a run.
struct Nvfp4MoeThresholds {
  std::int64_t max_mean_m8 = 2, max_mean_m16 = 8, max_mean_m32 = 24, max_mean_sm80 = 24;
};

// Sets tile_m, num_tiles and strides. Large tiles read weights once; rows that pad a tile cost tensor-core time. Each
// expert has at most one tile that is not full.
inline void nvfp4_moe_plan(Nvfp4Moe& p, const Nvfp4MoeThresholds& thresholds = {}) {
  const bool is_half = p.dtype != DType::kFloat32;
  const auto stride_of = [&](std::int64_t k) { return is_half ? (k + kMoeKGroup - 1) / kMoeKGroup * kMoeKGroup : k; };
  p.permuted_stride = stride_of(p.k), p.act_stride = stride_of(p.intermediate);
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
struct Nvfp4MoeWorkspace {
  std::size_t sorted_pairs = 0, tiles = 0, permuted_x = 0, act = 0, pair_out = 0;
};
inline Nvfp4MoeWorkspace nvfp4_moe_workspace(const Nvfp4Moe& p) {
  const bool is_half = p.dtype != DType::kFloat32;
  Nvfp4MoeWorkspace out;
  out.sorted_pairs = static_cast<std::size_t>(p.pairs()) * sizeof(int);
  out.tiles = static_cast<std::size_t>(p.num_tiles) * sizeof(ExpertTile);
  out.permuted_x = is_half ? static_cast<std::size_t>(2 * p.tokens * p.permuted_stride) : 0;
  out.act = static_cast<std::size_t>(p.pairs() * p.act_stride * (is_half ? 2 : 4));
  out.pair_out = static_cast<std::size_t>(p.pairs() * p.k) * sizeof(float);
  return out;
}

// Fills sorted_pairs, tiles and permuted_x; reports ids that are no experts.
int nvfp4_moe_route(const Nvfp4Moe& p, Stream stream);
// act, rounded to x's dtype.
int nvfp4_moe_gate_up(const Nvfp4Moe& p, Stream stream);
// pair_out[pair] = topk_weights[pair] · (w2 · act + w2_bias).
int nvfp4_moe_down(const Nvfp4Moe& p, Stream stream);
// out[token] = the sum of pair_out over its pairs.
int nvfp4_moe_sum(const Nvfp4Moe& p, Stream stream);

// The kernels that those two choose for float32, and for tile_m kMoeSm90TileM.
int nvfp4_moe_gate_up_float32(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_float32(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_gate_up_sm90(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_sm90(const Nvfp4Moe& p, Stream stream);

}  // namespace untorch::kernels::cuda
