// A mixture of experts with NVFP4 weights. A pair is a token and one of its experts.
//
// Pairs are sorted by expert and cut into blocks of rows of one expert (nvfp4_moe_route), so that each product is many
// small ones: w13 gives act, silu(gate) · up or what SwiGlu says (nvfp4_moe_gate_up), w2 what the pair adds to its
// token (nvfp4_moe_down), and nvfp4_moe_sum adds that up in the order of top_k. Nothing is read back: grids are as
// large as the shapes allow, and blocks without rows end at once.
//
// Half types go through tensor cores. A lane has 16 neighbouring k's of a weight's row in 8 bytes, one block of one
// scale; of the 64 k's that four lanes have, the matrix instruction's slots are given to those that lie in a word's
// nibbles p and p + 4. Rows of x and act are arranged to match, as `arranged_k` says, once, when they are written.
#pragma once

#include <cstddef>
#include <limits>

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Rows of one expert: the pairs sorted[begin] to sorted[begin + rows - 1]. No expert: -1, no rows.
struct MoeBlock {
  int expert, begin, rows, unused;
};

inline constexpr float kNoLimit = std::numeric_limits<float>::infinity();

// act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g), g = min(gate, limit).
struct SwiGlu {
  float alpha = 1.0f, beta = 0.0f, limit = kNoLimit;
};

struct Nvfp4Moe {
  DType dtype = DType::kBFloat16;                                     // of x and out: bfloat16, float16 or float32
  std::int64_t tokens = 0, k = 0, experts = 0, width = 0, top_k = 0;  // k and width are multiples of 16
  const void* x = nullptr;                                            // [tokens, k], rows x_row apart
  std::int64_t x_row = 0;
  const float* topk_weights = nullptr;     // dense [tokens, top_k]
  const std::int32_t* topk_ids = nullptr;  // the same; what is no expert adds nothing
  // Dense [experts, 2·width, k/2] and [experts, k, width/2], the even k in the lower half; their scales, E4M3, a
  // sixteenth as wide as k. 16-byte aligned.
  const std::uint8_t *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
  const float *w13_global = nullptr, *w2_global = nullptr;  // [experts]; w13's [experts, 2] with two_scales
  bool two_scales = false;
  const float *w13_bias = nullptr, *w2_bias = nullptr;  // null, or dense [experts, 2·width] and, aligned, [experts, k]
  SwiGlu swiglu;
  void* out = nullptr;     // dense [tokens, k]
  bool has_wgmma = false;  // sm_90 alone

  // As nvfp4_moe_plan sets them.
  int rows = 8;                                // of a block, at most
  std::int64_t blocks = 0;                     // that there can be
  std::int64_t arranged_row = 0, act_row = 0;  // elements: multiples of 64 with zeros behind, but for float32

  // What lies between, 16-byte aligned, of the bytes that nvfp4_moe_space says.
  int* sorted = nullptr;       // pairs by expert, [pairs]; those of no expert are left out
  MoeBlock* list = nullptr;    // [blocks]
  void* arranged = nullptr;    // x [tokens, arranged_row], for half types
  void* act = nullptr;         // [pairs, act_row], by place in `sorted`
  float* results = nullptr;    // [pairs, k]
  FaultWord* fault = nullptr;  // of the device

  std::int64_t pairs() const { return tokens * top_k; }
};

// k's whose order is the tensor cores' own.
inline constexpr int kMoeGroup = 64;

// Pairs that one launch takes, and bytes of `results` that tokens are shared out for.
inline constexpr std::int64_t kMoeMostPairs = std::int64_t{1} << 30, kMoeResultBytes = std::int64_t{256} << 20;

// Rows of a block that the tensor instructions of sm_90 multiply.
inline constexpr int kMoeWgmmaRows = 160;

// Rows of an expert, in the mean, up to which blocks have 8, 16 and 32 rows; above they have 64, or kMoeWgmmaRows where
// the GPU has those instructions. `before_wgmma` is to be read off benchmarks/gpu_nvfp4_moe.py, whose --mma-mean
// moves it for a run.
struct Nvfp4MoeLimits {
  std::int64_t of_8 = 2, of_16 = 8, of_32 = 24, before_wgmma = 24;
};

// Sets what follows from the shapes. Full blocks read weights once, rows that are not there cost arithmetic. A full
// block has all its rows, and each expert has at most one that is not.
inline void nvfp4_moe_plan(Nvfp4Moe& p, const Nvfp4MoeLimits& limits = {}) {
  const bool is_half = p.dtype != DType::kFloat32;
  const auto row_of = [&](std::int64_t k) { return is_half ? (k + kMoeGroup - 1) / kMoeGroup * kMoeGroup : k; };
  p.arranged_row = row_of(p.k), p.act_row = row_of(p.width);
  const std::int64_t mean = p.experts == 0 ? 0 : p.pairs() / p.experts;
  if (is_half && p.has_wgmma && mean > limits.before_wgmma) {
    p.rows = kMoeWgmmaRows;
  } else {
    p.rows = !is_half || mean <= limits.of_8 ? 8 : mean <= limits.of_16 ? 16 : mean <= limits.of_32 ? 32 : 64;
  }
  const std::int64_t most = p.pairs() / p.rows + p.experts;
  p.blocks = p.experts == 0 ? 0 : most < p.pairs() ? most : p.pairs();
}

// Bytes of what lies between.
struct Nvfp4MoeSpace {
  std::size_t sorted = 0, list = 0, arranged = 0, act = 0, results = 0;
};
inline Nvfp4MoeSpace nvfp4_moe_space(const Nvfp4Moe& p) {
  const bool is_half = p.dtype != DType::kFloat32;
  Nvfp4MoeSpace out;
  out.sorted = static_cast<std::size_t>(p.pairs()) * sizeof(int);
  out.list = static_cast<std::size_t>(p.blocks) * sizeof(MoeBlock);
  out.arranged = is_half ? static_cast<std::size_t>(2 * p.tokens * p.arranged_row) : 0;
  out.act = static_cast<std::size_t>(p.pairs() * p.act_row * (is_half ? 2 : 4));
  out.results = static_cast<std::size_t>(p.pairs() * p.k) * sizeof(float);
  return out;
}

// Fills `sorted`, `list` and `arranged`; reports ids that are no experts.
int nvfp4_moe_route(const Nvfp4Moe& p, Stream stream);
// act, rounded to x's dtype.
int nvfp4_moe_gate_up(const Nvfp4Moe& p, Stream stream);
// results[pair] = topk_weights[pair] · (w2 · act + w2_bias).
int nvfp4_moe_down(const Nvfp4Moe& p, Stream stream);
// out[token] = the sum of results of its pairs.
int nvfp4_moe_sum(const Nvfp4Moe& p, Stream stream);

// What those two call: for float32, and for blocks of kMoeWgmmaRows rows.
int nvfp4_moe_gate_up_float(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_float(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_gate_up_wgmma(const Nvfp4Moe& p, Stream stream);
int nvfp4_moe_down_wgmma(const Nvfp4Moe& p, Stream stream);

}  // namespace untorch::kernels::cuda
