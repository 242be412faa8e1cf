// Fused MoE with int4 weights on the CPU. Bytes: each expert's weights once, whatever the number of its tokens.
#include "kernels/cpu/moe/int4_moe.h"

#include <cstddef>
#include <vector>

#include "kernels/cpu/w4a8/w4a8.h"

namespace untorch::kernels::cpu {
namespace {

const void* skip_scales(const Int4Experts& w, std::int64_t count) {
  const std::int64_t bytes = w.scale_type == ScaleType::kFloat32 ? 4 : 2;
  return static_cast<const std::byte*>(w.scales) + count * bytes;
}

void multiply(const Int4Moe& p, const Routing& routing, const Int4Experts& w, const ExpertRows& rows) {
  std::vector<W4A8Linear> calls;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    if (routing.count(e) == 0) continue;
    const auto fill = [&](auto& call) {
      take_rows(rows, routing, e, call);
      call.k = w.k, call.weight = w.weight + e * (w.n * w.k / 8), call.scale_type = w.scale_type, call.group = p.group;
    };
    if (p.integers) {
      fill(calls.emplace_back());
      calls.back().has_zeros = w.has_zeros;
      calls.back().scales = skip_scales(w, e * (w.n * (w.k / p.group) * (w.has_zeros ? 2 : 1)));
    } else {
      Int4Linear call;
      fill(call);
      call.inner_k_tiles = w.inner_k_tiles, call.scale_columns = p.experts * w.n;
      call.scales = skip_scales(w, e * (w.n * 2));
      int4_linear(call);
    }
  }
  w4a8_linears(calls.data(), static_cast<std::int64_t>(calls.size()));
}

}  // namespace

std::int64_t int4_moe(const Int4Moe& p) {
  const std::int64_t width = p.intermediate;
  std::vector<float> hidden;  // gates, then ups, in each row
  return run_moe(p, [&](const Routing& routing, float* rows) {
    const auto pairs = static_cast<std::int64_t>(routing.pairs.size());
    hidden.resize(static_cast<std::size_t>(pairs * 2 * width));
    multiply(p, routing, p.w13, {rows, p.k, p.k, 2 * width, p.w13_bias, hidden.data()});
    apply_swiglu(p.swiglu, pairs, width, hidden.data(), hidden.data() + width, 2 * width);
    multiply(p, routing, p.w2, {hidden.data(), width, 2 * width, p.k, p.w2_bias, rows});
  });
}

}  // namespace untorch::kernels::cpu
