// Shared by the fronts of nvfp4_moe and int4_moe: arguments beside the weights, and checks of them.
#pragma once

#include <cmath>
#include <limits>

#include "kernels/cpu/moe/moe.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

struct SwigluArguments {
  double alpha = 1.0, beta = 0.0;
  const double* limit = nullptr;  // none

  // Infinity for none.
  float limit_or_infinity() const {
    constexpr double kLargest = std::numeric_limits<float>::max();
    return limit == nullptr || *limit > kLargest ? std::numeric_limits<float>::infinity() : static_cast<float>(*limit);
  }
  // Plain silu(gate) · up.
  bool is_silu() const { return alpha == 1.0 && beta == 0.0 && std::isinf(limit_or_infinity()); }
  kernels::cpu::SwiGlu for_cpu() const {
    return {static_cast<float>(alpha), static_cast<float>(beta), limit_or_infinity(), is_silu()};
  }
};

struct MoeShape {
  std::int64_t tokens = 0, k = 0, experts = 0, intermediate = 0, top_k = 0;
};

struct MoeArguments {
  const Tensor &hidden_states, &topk_weights, &topk_ids;
  const Tensor *w13_bias = nullptr, *w2_bias = nullptr;
  SwigluArguments swiglu{};
};

// alpha and beta finite in float32, the limit above 0.
inline void check_swiglu(const char* op, const SwigluArguments& given) {
  const auto check_float = [&](const char* argument, double number) {
    check(std::abs(number) <= static_cast<double>(std::numeric_limits<float>::max()), op, ": argument '", argument,
          "' must be a finite number of float32, got ", number);
  };
  check_float("swiglu_alpha", given.alpha);
  check_float("swiglu_beta", given.beta);
  check(given.limit == nullptr || *given.limit > 0.0, op,
        ": argument 'swiglu_limit' must be above 0, or null for no limit, got ",
        given.limit == nullptr ? 0.0 : *given.limit);
}

// Throws for a pair that a kernel refused; -1 is none.
inline void check_pair(const char* op, const kernels::cpu::Moe& p, std::int64_t invalid) {
  check(invalid < 0, op, ": argument 'topk_ids' must have experts from 0 to ", p.experts - 1, ", or -1 for none, got ",
        invalid < 0 ? 0 : p.topk_ids[invalid], " for token ", invalid < 0 ? 0 : invalid / p.top_k);
}

}  // namespace untorch::shims
