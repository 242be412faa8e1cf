// The activations that packed linear layers and convolutions fuse, by the names that a model library uses.
#pragma once

#include <string_view>
#include <utility>

#include "kernels/cpu/gemm/gemm.h"
#include "shims/shim.h"

namespace untorch::shims {

// Null is none. Throws kUnsupported for another name.
inline kernels::Activation activation_of(const char* op, const char* name) {
  using kernels::Activation;
  const std::string_view wanted = name == nullptr ? "none" : name;
  constexpr std::pair<std::string_view, Activation> kNames[] = {
      {"none", Activation::kNone},           {"relu", Activation::kRelu},
      {"gelu", Activation::kGelu},           {"gelu_tanh", Activation::kGeluTanh},
      {"silu", Activation::kSilu},           {"tanh", Activation::kTanh},
      {"sigmoid", Activation::kSigmoid},     {"relu6", Activation::kRelu6},
      {"hardswish", Activation::kHardswish}, {"hardsigmoid", Activation::kHardsigmoid}};
  for (const auto& [known, activation] : kNames) {
    if (known == wanted) return activation;
  }
  throw_error(ErrorKind::kUnsupported, op, ": activation '", wanted,
              "' is not supported, expected none, relu, gelu, gelu_tanh, silu, tanh, sigmoid, relu6, hardswish or "
              "hardsigmoid");
}

}  // namespace untorch::shims
