// Fused MoE with NVFP4 weights on the CPU. Bytes: each expert's weights once, whatever the number of its tokens.
#include "kernels/cpu/moe/nvfp4_moe.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/w4a16/nvfp4.h"

namespace untorch::kernels::cpu {
namespace {

// Pairs of a token and one of its experts, stably sorted by expert; those of no expert are left out.
struct Routing {
  std::vector<std::int64_t> pairs;   // token · top_k + i
  std::vector<std::int64_t> starts;  // of each expert in `pairs`, and the end
};

std::int64_t first_invalid_pair(const Nvfp4Moe& p) {
  for (std::int64_t i = 0; i < p.tokens * p.top_k; ++i) {
    if (p.topk_ids[i] < -1 || p.topk_ids[i] >= p.experts) return i;
  }
  return -1;
}

Routing route(const Nvfp4Moe& p) {
  Routing out;
  out.starts.assign(static_cast<std::size_t>(p.experts + 1), 0);
  const std::int64_t count = p.tokens * p.top_k;
  for (std::int64_t i = 0; i < count; ++i) {
    if (p.topk_ids[i] >= 0) ++out.starts[static_cast<std::size_t>(p.topk_ids[i]) + 1];
  }
  std::partial_sum(out.starts.begin(), out.starts.end(), out.starts.begin());
  std::vector<std::int64_t> next = out.starts;
  out.pairs.resize(static_cast<std::size_t>(out.starts.back()));
  for (std::int64_t i = 0; i < count; ++i) {
    if (p.topk_ids[i] >= 0) out.pairs[static_cast<std::size_t>(next[static_cast<std::size_t>(p.topk_ids[i])]++)] = i;
  }
  return out;
}

// Matrix `index` of dense ones [.., rows, k].
Nvfp4Weight matrix_of(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t index, std::int64_t rows,
                      std::int64_t k, const float* global) {
  Nvfp4Weight out;
  out.k = k;
  out.codes = codes + index * rows * k / 2;
  out.block_scales = scales + index * rows * k / kNvfp4Block;
  out.global_scales = global;
  return out;
}

void apply_swiglu(const SwiGlu& swiglu, std::int64_t rows, std::int64_t width, std::vector<float>& gates,
                  const std::vector<float>& ups) {
  if (swiglu.silu) {
    apply_activation(rows, width, Activation::kSilu, gates.data(), width);
    for (std::size_t i = 0; i < gates.size(); ++i) gates[i] *= ups[i];
    return;
  }
  const float limit = swiglu.limit;
  std::vector<float> sigmoids(gates.size());
  for (std::size_t i = 0; i < gates.size(); ++i) {
    gates[i] = std::min(gates[i], limit);  // NaN stays
    sigmoids[i] = swiglu.alpha * gates[i];
  }
  apply_activation(rows, width, Activation::kSigmoid, sigmoids.data(), width);
  for (std::size_t i = 0; i < gates.size(); ++i) {
    gates[i] *= sigmoids[i] * (std::clamp(ups[i], -limit, limit) + swiglu.beta);
  }
}

// [rows, width] of the expert's bias from `column` on, or zeros. bias: [experts, bias_width] or null.
std::vector<float> bias_rows(const float* bias, std::int64_t bias_width, std::int64_t expert, std::int64_t column,
                             std::int64_t rows, std::int64_t width) {
  std::vector<float> out(static_cast<std::size_t>(rows * width), 0.0f);
  if (bias == nullptr) return out;
  const float* const from = bias + expert * bias_width + column;
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(from, width, out.data() + i * width);
  return out;
}

// Adds expert `e` to the sums of its tokens.
void run_expert(const Nvfp4Moe& p, std::int64_t e, const std::int64_t* pairs, std::int64_t count,
                std::vector<float>& scratch) {
  const std::int64_t k = p.k, width = p.intermediate;
  std::vector<float> rows(static_cast<std::size_t>(count * k));
  std::vector<float> gates = bias_rows(p.w13_bias, 2 * width, e, 0, count, width),
                     ups = bias_rows(p.w13_bias, 2 * width, e, width, count, width),
                     down = bias_rows(p.w2_bias, k, e, 0, count, k);
  for (std::int64_t i = 0; i < count; ++i) {
    std::copy_n(p.x + pairs[i] / p.top_k * p.x_stride, k, rows.data() + i * k);
  }
  const float* const global = p.w13_global + e * (p.two_scales ? 2 : 1);
  const auto linear = [&](const Nvfp4Weight& weight, std::int64_t n, const std::vector<float>& x,
                          std::vector<float>& out) {
    nvfp4_linear({count, n, x.data(), weight.k, weight.k, weight, out.data()}, scratch);
  };
  linear(matrix_of(p.w13, p.w13_scale, 2 * e, width, k, global), width, rows, gates);
  linear(matrix_of(p.w13, p.w13_scale, 2 * e + 1, width, k, global + (p.two_scales ? 1 : 0)), width, rows, ups);
  apply_swiglu(p.swiglu, count, width, gates, ups);
  linear(matrix_of(p.w2, p.w2_scale, e, k, width, p.w2_global + e), k, gates, down);
  for (std::int64_t i = 0; i < count; ++i) {
    const float factor = p.topk_weights[pairs[i]];
    float* const sum = p.out + pairs[i] / p.top_k * k;
    for (std::int64_t j = 0; j < k; ++j) sum[j] += factor * down[static_cast<std::size_t>(i * k + j)];
  }
}

}  // namespace

std::int64_t nvfp4_moe(const Nvfp4Moe& p) {
  if (const std::int64_t invalid = first_invalid_pair(p); invalid >= 0) return invalid;
  const Routing routing = route(p);
  std::fill_n(p.out, p.tokens * p.k, 0.0f);
  std::vector<float> scratch;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    const std::int64_t begin = routing.starts[static_cast<std::size_t>(e)],
                       count = routing.starts[static_cast<std::size_t>(e) + 1] - begin;
    if (count > 0) run_expert(p, e, routing.pairs.data() + begin, count, scratch);
  }
  return -1;
}

}  // namespace untorch::kernels::cpu
