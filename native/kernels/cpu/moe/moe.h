// Mixture of experts on the CPU: tokens by expert, the activation between an expert's two GEMMs, and the weighted sum.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace untorch::kernels::cpu {

// act = (clamp(up, -limit, limit) + beta) · g · sigmoid(alpha · g), g = min(gate, limit); silu: silu(gate) · up.
struct SwiGlu {
  float alpha = 1.0f, beta = 0.0f, limit = 0.0f;
  bool silu = true;
};

struct Moe {
  std::int64_t tokens = 0, k = 0, experts = 0, intermediate = 0, top_k = 0;
  const float* x = nullptr;  // [tokens, k], rows x_stride apart
  std::int64_t x_stride = 0;
  const float* topk_weights = nullptr;                  // dense [tokens, top_k]
  const std::int32_t* topk_ids = nullptr;               // the same; -1 for no expert
  const float *w13_bias = nullptr, *w2_bias = nullptr;  // null, or dense [experts, 2·intermediate] and [experts, k]
  SwiGlu swiglu;
  float* out = nullptr;  // dense [tokens, k]
};

// Pairs of a token and one of its experts, stably sorted by expert; those of no expert are left out.
struct Routing {
  std::vector<std::int64_t> pairs;   // token · top_k + i
  std::vector<std::int64_t> starts;  // of each expert in `pairs`, and the end

  std::int64_t first(std::int64_t expert) const { return starts[static_cast<std::size_t>(expert)]; }
  std::int64_t count(std::int64_t expert) const { return first(expert + 1) - first(expert); }
};

// Rows of the experts' tokens, in the routing's order, through one of their matrices.
struct ExpertRows {
  const float* x = nullptr;
  std::int64_t width = 0, stride = 0;  // of x
  std::int64_t n = 0;                  // outputs
  const float* bias = nullptr;         // [experts, n], may be null
  float* out = nullptr;                // [pairs, n]
};

// Gives a linear layer's call the rows of one expert; the weight and k are left.
template <class Linear>
void take_rows(const ExpertRows& rows, const Routing& routing, std::int64_t expert, Linear& call) {
  const std::int64_t first = routing.first(expert);
  call.m = routing.count(expert), call.n = rows.n;
  call.x = rows.x + first * rows.stride, call.x_width = rows.width, call.x_stride = rows.stride;
  call.bias = rows.bias == nullptr ? nullptr : rows.bias + expert * rows.n;
  call.out = rows.out + first * rows.n;
}

// -1; or the first pair whose topk_ids is no expert.
std::int64_t first_invalid_pair(const Moe& p);
Routing route(const Moe& p);
// gates [rows, width] become act(gates, ups); rows of both are `stride` apart.
void apply_swiglu(const SwiGlu& swiglu, std::int64_t rows, std::int64_t width, float* gates, const float* ups,
                  std::int64_t stride);

// `rows` [pairs, k] of x, one for each pair of the routing.
void gather_rows(const Moe& p, const Routing& routing, float* rows);
// out [token] = the sum of its pairs' results [pairs, k] by their weights, in the order of the experts.
void combine_rows(const Moe& p, const Routing& routing, const float* results);
// The tokens that are computed at once, so that the memory for pairs is bounded.
std::int64_t tokens_at_once(const Moe& p);

// out [token] = the sum over its experts of what `experts(routing, rows)` makes of the rows of its pairs, [pairs, k],
// in place. -1; or the pair that is no expert's, and nothing is computed.
template <class Experts>
std::int64_t run_moe(const Moe& whole, Experts&& experts) {
  if (const std::int64_t invalid = first_invalid_pair(whole); invalid >= 0) return invalid;
  const std::int64_t step = tokens_at_once(whole);
  std::vector<float> rows;
  for (std::int64_t first = 0; first < whole.tokens; first += step) {
    Moe p = whole;
    p.tokens = std::min(step, whole.tokens - first);
    p.x += first * p.x_stride, p.out += first * p.k;
    p.topk_weights += first * p.top_k, p.topk_ids += first * p.top_k;
    const Routing routing = route(p);
    rows.resize(routing.pairs.size() * static_cast<std::size_t>(p.k));
    gather_rows(p, routing, rows.data());
    experts(routing, rows.data());
    combine_rows(p, routing, rows.data());
  }
  return -1;
}

}  // namespace untorch::kernels::cpu
