// The contract of products with NVFP4 weights, on any device.
#pragma once

#include <cmath>

#include "kernels/nvfp4_prefill.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

inline constexpr std::int64_t kNvfp4Block = 16;  // values that share a scale

// Sizes of x [m, x_width] times a weight of n rows and k columns.
struct Nvfp4Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0;
  int inner_k_tiles = 0;    // of the layout for tensor cores; 0: bytes, the even k in the lower half
  bool row_scales = false;  // a global scale for each row
  Dims out_sizes;
};

// The weight and its scales alone, as nvfp4_linear below takes them.
Nvfp4Shape check_nvfp4_weight(const char* op, const Tensor& weight, const Tensor& block_scale,
                              const Tensor& global_scale);

// untorch::nvfp4_linear: x float32, bfloat16 or float16 [.., x_width] with a dense last dimension, x_width <= k; weight
// uint8 [n, k/2] or int32 [n/8][k/(16·t)][32][t/2], dense; block_scale float8_e4m3fn [n, k/16], dense; global_scale
// float32 with one element, or [n]; bias null or [n] of x's dtype, any stride. Throws where that is not so; looks at no
// device.
Nvfp4Shape check_nvfp4_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& block_scale,
                              const Tensor& global_scale, const Tensor* bias);

// What the argument `prefill` asks for: "exact", "fp8" or "fp4". Throws where it is null or another word.
kernels::Nvfp4Prefill check_prefill(const char* op, const char* prefill);

// Sizes of a mixture of experts: tokens, their width, experts, the width between the two products, experts of a token.
struct Nvfp4MoeShape {
  std::int64_t tokens = 0, k = 0, experts = 0, width = 0, top_k = 0;
  bool two_scales = false;  // gate and up have a global scale each
};

struct Nvfp4MoeArguments {
  const Tensor &hidden_states, &topk_weights, &topk_ids, &w13, &w13_scale, &w2, &w2_scale, &w13_global, &w2_global;
  const Tensor *w13_bias = nullptr, *w2_bias = nullptr;
  double swiglu_alpha = 1.0, swiglu_beta = 0.0;
  const double* swiglu_limit = nullptr;  // none

  float limit() const;  // infinity where there is none
  // Nothing but silu(gate) · up.
  bool is_silu() const { return swiglu_alpha == 1.0 && swiglu_beta == 0.0 && std::isinf(limit()); }
};

// untorch::nvfp4_moe: hidden_states float32, bfloat16 or float16 [M, K] with a dense last dimension; topk_weights
// float32 and topk_ids int32 [M, top_k]; w13 uint8 [E, 2·I, K/2] and w2 [E, K, I/2]; their scales float8_e4m3fn, a
// sixteenth as wide; w13_global float32 [E] or [E, 2], w2_global [E]; biases float32 [E, 2·I] and [E, K]; all dense but
// the first. alpha and beta finite in float32, the limit above 0.
Nvfp4MoeShape check_nvfp4_moe(const char* op, const Nvfp4MoeArguments& given);

}  // namespace untorch::shims
