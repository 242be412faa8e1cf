// Fused MoE with NVFP4 weights on the CPU. Bytes: each expert's weights once, whatever the number of its tokens.
#include "kernels/cpu/moe/nvfp4_moe.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "kernels/cpu/w4a16/nvfp4.h"
#include "kernels/cpu/w4a8/w4a8.h"

namespace untorch::kernels::cpu {
namespace {

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

// `to` [rows, width] has the expert's bias from `column` on in each row, or zeros. bias: [experts, bias_width] or null.
void bias_rows(const float* bias, std::int64_t bias_width, std::int64_t expert, std::int64_t column, std::int64_t rows,
               std::int64_t width, float* to) {
  if (bias == nullptr) {
    std::fill_n(to, rows * width, 0.0f);
    return;
  }
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(bias + expert * bias_width + column, width, to + i * width);
}

// The experts' matrices [n, k] below each other, in w4a8_linear's layout.
struct Panels {
  const std::uint8_t *words = nullptr, *scales = nullptr;
  std::int64_t k = 0;
  const float* global = nullptr;
  std::int64_t parts = 1;  // of n, with a global scale each
};

void multiply(const Nvfp4Moe& p, const Routing& routing, const Panels& w, const ExpertRows& rows) {
  const std::int64_t n = rows.n;
  std::vector<W4A8Linear> calls;
  std::vector<std::int64_t> experts;
  for (std::int64_t e = 0; e < p.experts; ++e) {
    if (routing.count(e) == 0) continue;
    experts.push_back(e);
    W4A8Linear& call = calls.emplace_back();
    take_rows(rows, routing, e, call);
    call.format = W4A8Format::kNvfp4, call.k = w.k, call.group = kNvfp4Block;
    call.weight = reinterpret_cast<const std::int32_t*>(w.words + e * (n * w.k / 2));
    call.scales = w.scales + e * (n * w.k / kNvfp4Block);
  }
  std::vector<float> globals(calls.size() * static_cast<std::size_t>(n));  // one for each output
  float* to = globals.data();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    calls[i].global_scales = to;
    for (std::int64_t part = 0; part < w.parts; ++part, to += n / w.parts) {
      std::fill_n(to, n / w.parts, w.global[experts[i] * w.parts + part]);
    }
  }
  w4a8_linears(calls.data(), static_cast<std::int64_t>(calls.size()));
}

std::int64_t by_integers(const Nvfp4Moe& p) {
  const std::int64_t width = p.intermediate;
  const auto padded = [](std::int64_t k) { return (k + kW4A8Part - 1) / kW4A8Part * kW4A8Part; };
  const Panels w13{p.w13, p.w13_scale, padded(p.k), p.w13_global, p.two_scales ? 2 : 1};
  const Panels w2{p.w2, p.w2_scale, padded(width), p.w2_global};
  std::vector<float> hidden;  // gates, then ups, in each row
  return run_moe(p, [&](const Routing& routing, float* rows) {
    const auto pairs = static_cast<std::int64_t>(routing.pairs.size());
    hidden.resize(static_cast<std::size_t>(pairs * 2 * width));
    multiply(p, routing, w13, {rows, p.k, p.k, 2 * width, p.w13_bias, hidden.data()});
    apply_swiglu(p.swiglu, pairs, width, hidden.data(), hidden.data() + width, 2 * width);
    multiply(p, routing, w2, {hidden.data(), width, 2 * width, p.k, p.w2_bias, rows});
  });
}

}  // namespace

std::int64_t nvfp4_moe(const Nvfp4Moe& p) {
  if (p.integers) return by_integers(p);
  const std::int64_t k = p.k, width = p.intermediate;
  std::vector<float> gates, ups, down, scratch;
  const auto expert = [&](std::int64_t e, std::int64_t count, float* rows) {
    gates.resize(static_cast<std::size_t>(count * width)), ups.resize(gates.size());
    down.resize(static_cast<std::size_t>(count * k));
    bias_rows(p.w13_bias, 2 * width, e, 0, count, width, gates.data());
    bias_rows(p.w13_bias, 2 * width, e, width, count, width, ups.data());
    bias_rows(p.w2_bias, k, e, 0, count, k, down.data());
    const float* const global = p.w13_global + e * (p.two_scales ? 2 : 1);
    const auto linear = [&](const Nvfp4Weight& weight, std::int64_t n, const float* x, float* out) {
      nvfp4_linear({count, n, x, weight.k, weight.k, weight, out}, scratch);
    };
    linear(matrix_of(p.w13, p.w13_scale, 2 * e, width, k, global), width, rows, gates.data());
    linear(matrix_of(p.w13, p.w13_scale, 2 * e + 1, width, k, global + (p.two_scales ? 1 : 0)), width, rows,
           ups.data());
    apply_swiglu(p.swiglu, count, width, gates.data(), ups.data(), width);
    linear(matrix_of(p.w2, p.w2_scale, e, k, width, p.w2_global + e), k, gates.data(), down.data());
    std::copy(down.begin(), down.end(), rows);
  };
  return run_moe(p, [&](const Routing& routing, float* rows) {
    for (std::int64_t e = 0; e < p.experts; ++e) {
      if (routing.count(e) > 0) expert(e, routing.count(e), rows + routing.first(e) * k);
    }
  });
}

}  // namespace untorch::kernels::cpu
