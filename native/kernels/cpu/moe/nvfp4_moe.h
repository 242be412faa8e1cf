// Fused MoE with NVFP4 weights on the CPU: expert after expert, dequantize and GEMM in float32.
#pragma once

#include <cstdint>

namespace untorch::kernels::cpu {

// act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g), g = min(gate, limit); silu: silu(gate) · up.
struct SwiGlu {
  float alpha = 1.0f, beta = 0.0f, limit = 0.0f;
  bool silu = true;
};

struct Nvfp4Moe {
  std::int64_t tokens = 0, k = 0, experts = 0, intermediate = 0, top_k = 0;
  const float* x = nullptr;  // [tokens, k], rows x_stride apart
  std::int64_t x_stride = 0;
  const float* topk_weights = nullptr;     // dense [tokens, top_k]
  const std::int32_t* topk_ids = nullptr;  // the same; -1 for no expert
  // Dense [experts, 2·intermediate, k/2] and [experts, k, intermediate/2] bytes; their scales, E4M3, [.., k/16].
  const std::uint8_t *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
  const float *w13_global = nullptr, *w2_global = nullptr;  // [experts]; w13's [experts, 2] with two_scales
  bool two_scales = false;
  const float *w13_bias = nullptr, *w2_bias = nullptr;  // null, or dense [experts, 2·intermediate] and [experts, k]
  SwiGlu swiglu;
  float* out = nullptr;  // dense [tokens, k]
};

// out [token] = the sum over its experts. -1; or the pair (token · top_k + i) whose topk_ids is no expert, and nothing
// is computed.
std::int64_t nvfp4_moe(const Nvfp4Moe& p);

}  // namespace untorch::kernels::cpu
