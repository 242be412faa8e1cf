// Activation and residual on a tile of C. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

// What of an epilogue the microkernel does in registers: the residual and a clamp. `rest` is left to apply_epilogue().
struct TileEpilogue {
  bool residual, rest;
  float low, high;
};

inline TileEpilogue tile_epilogue(Epilogue epilogue, bool has_residual) {
  constexpr float kInfinity = __builtin_inff();
  const Activation a = epilogue.activation;
  if (has_residual && a != Activation::kNone && !epilogue.residual_first) return {false, true, -kInfinity, kInfinity};
  if (a == Activation::kNone) return {has_residual, false, -kInfinity, kInfinity};
  if (a == Activation::kRelu) return {has_residual, false, 0.0f, kInfinity};
  if (a == Activation::kRelu6) return {has_residual, false, 0.0f, 6.0f};
  return {has_residual, true, -kInfinity, kInfinity};
}

// Of a tile in memory.
void apply_epilogue(std::int64_t rows, std::int64_t cols, Epilogue epilogue, const float* residual, std::int64_t ldr,
                    float* c, std::int64_t ldc);

}  // namespace untorch::kernels::UNTORCH_ISA
