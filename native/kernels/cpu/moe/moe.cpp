#include "kernels/cpu/moe/moe.h"

#include <numeric>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {
namespace {

constexpr std::int64_t kBytesAtOnce = 64 << 20;
// Calls body(i) for `count` rows of `values` each, in parallel where that pays.
template <class Body>
void for_rows(std::int64_t count, std::int64_t values, Body&& body) {
  const auto least = static_cast<std::int64_t>(kParallelWork);
  for_each_item_grained(count, least / std::max(values, std::int64_t{1}), count * values >= 2 * least, body);
}

void swiglu_row(const SwiGlu& swiglu, std::int64_t width, float* gate, const float* up) {
  if (swiglu.silu) {
    apply_activation(1, width, Activation::kSilu, gate, width);
    for (std::int64_t j = 0; j < width; ++j) gate[j] *= up[j];
    return;
  }
  const float limit = swiglu.limit;
  constexpr std::int64_t kBlock = 256;
  float sigmoid[kBlock];
  for (; width > 0; width -= kBlock, gate += kBlock, up += kBlock) {
    const std::int64_t count = std::min(kBlock, width);
    for (std::int64_t j = 0; j < count; ++j) {
      gate[j] = std::min(gate[j], limit);  // NaN stays
      sigmoid[j] = swiglu.alpha * gate[j];
    }
    apply_activation(1, count, Activation::kSigmoid, sigmoid, count);
    for (std::int64_t j = 0; j < count; ++j) {
      gate[j] *= sigmoid[j] * (std::clamp(up[j], -limit, limit) + swiglu.beta);
    }
  }
}

}  // namespace

std::int64_t first_invalid_pair(const Moe& p) {
  for (std::int64_t i = 0; i < p.tokens * p.top_k; ++i) {
    if (p.topk_ids[i] < -1 || p.topk_ids[i] >= p.experts) return i;
  }
  return -1;
}

Routing route(const Moe& p) {
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

void apply_swiglu(const SwiGlu& swiglu, std::int64_t rows, std::int64_t width, float* gates, const float* ups,
                  std::int64_t stride) {
  for_rows(rows, width, [&](std::int64_t i) { swiglu_row(swiglu, width, gates + i * stride, ups + i * stride); });
}

void gather_rows(const Moe& p, const Routing& routing, float* rows) {
  for_rows(static_cast<std::int64_t>(routing.pairs.size()), p.k, [&](std::int64_t i) {
    std::copy_n(p.x + routing.pairs[static_cast<std::size_t>(i)] / p.top_k * p.x_stride, p.k, rows + i * p.k);
  });
}

void combine_rows(const Moe& p, const Routing& routing, const float* results) {
  // Where each token's pairs are, in ascending order.
  std::vector<std::int64_t> places(static_cast<std::size_t>(p.tokens * p.top_k)),
      counts(static_cast<std::size_t>(p.tokens), 0);
  for (std::size_t i = 0; i < routing.pairs.size(); ++i) {
    const auto token = static_cast<std::size_t>(routing.pairs[i] / p.top_k);
    places[token * static_cast<std::size_t>(p.top_k) + static_cast<std::size_t>(counts[token]++)] =
        static_cast<std::int64_t>(i);
  }
  for_rows(p.tokens, p.k * p.top_k, [&](std::int64_t token) {
    float* const sum = p.out + token * p.k;
    std::fill_n(sum, p.k, 0.0f);
    for (std::int64_t i = 0; i < counts[static_cast<std::size_t>(token)]; ++i) {
      const std::int64_t place = places[static_cast<std::size_t>(token * p.top_k + i)];
      const float factor = p.topk_weights[routing.pairs[static_cast<std::size_t>(place)]];
      const float* const result = results + place * p.k;
      for (std::int64_t j = 0; j < p.k; ++j) sum[j] += factor * result[j];
    }
  });
}

std::int64_t tokens_at_once(const Moe& p) {
  const std::int64_t bytes = std::max(p.k, 2 * p.intermediate) * p.top_k * 4;
  return bytes == 0 ? std::max(p.tokens, std::int64_t{1}) : std::max(kBytesAtOnce / bytes, std::int64_t{1});
}

}  // namespace untorch::kernels::cpu
