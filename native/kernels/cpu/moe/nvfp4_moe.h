// Fused MoE with NVFP4 weights on the CPU: expert after expert, dequantize and GEMM in float32; or, with int8
// activations, all experts at once.
#pragma once

#include <cstdint>

#include "kernels/cpu/moe/moe.h"

namespace untorch::kernels::cpu {

struct Nvfp4Moe : Moe {
  // Dense [experts, 2·intermediate, k/2] and [experts, k, intermediate/2] bytes; their scales, E4M3, [.., k/16].
  const std::uint8_t *w13 = nullptr, *w13_scale = nullptr, *w2 = nullptr, *w2_scale = nullptr;
  // Int8 activations: the rows of all experts below each other in w4a8_linear's layout, k and intermediate padded to
  // multiples of 32.
  bool integers = false;
  const float *w13_global = nullptr, *w2_global = nullptr;  // [experts]; w13's [experts, 2] with two_scales
  bool two_scales = false;
};

// As run_moe().
std::int64_t nvfp4_moe(const Nvfp4Moe &p);

}  // namespace untorch::kernels::cpu
