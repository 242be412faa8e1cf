// Layers with a recurrent state, for sequences of any lengths in one batch: short causal convolutions and the gated
// delta rule.
#pragma once

#include <cstdint>

#include "kernels/launcher.h"
#include "kernels/state_pool.h"

namespace untorch::kernels {

// out[t][c] = bias[c] + Σ_i weight[c][i] · x[t − width + 1 + i][c], then SiLU. The state has the last width − 1 inputs
// [width − 1, channels], the oldest first.
struct CausalConv1d {
  DType dtype{};  // of x, weight, bias and out: float32, bfloat16 or float16
  std::int64_t channels = 0, width = 0;
  bool silu = false;
  const void* x = nullptr;  // [tokens, channels]
  std::int64_t x_token = 0;
  const void *weight = nullptr, *bias = nullptr;  // [channels, width], [channels] or null
  void* out = nullptr;                            // [tokens, channels]; 0 for tokens of no sequence
  StatePool pool;
};

// S ← exp(g)·S, S ← S + k ⊗ beta·(v − kᵀS), out = scale·qᵀS for each token and value head, with S [width, width_v] the
// head's state. Without beta S ← S + k ⊗ v.
struct GatedDeltaRule {
  DType dtype{};  // of q, k, v and out: float32, bfloat16 or float16
  std::int64_t heads = 0, heads_k = 0, width = 0, width_v = 0;
  bool l2norm = false;  // of q and k first
  float scale = 1.0f;
  const void *q = nullptr, *k = nullptr;  // [tokens, heads_k, width]; value head h has those of h / (heads / heads_k)
  std::int64_t q_token = 0, q_head = 0, k_token = 0, k_head = 0;
  const void* v = nullptr;  // [tokens, heads, width_v]
  std::int64_t v_token = 0, v_head = 0;
  const float* g = nullptr;     // [tokens, heads, g_width], dense
  std::int64_t g_width = 0;     // 1, or width
  const float* beta = nullptr;  // [tokens, heads], dense, or null
  void* out = nullptr;          // [tokens, heads, width_v]; 0 for tokens of no sequence
  StatePool pool;
};

inline constexpr float kDeltaRuleNormEpsilon = 1e-6f;

namespace cpu {

// The lists of the pool have been checked. Throw std::bad_alloc.
void causal_conv1d(const CausalConv1d& p);
void gated_delta_rule(const GatedDeltaRule& p);

}  // namespace cpu

}  // namespace untorch::kernels
