// Fused MoE with int4 weights on the CPU, in either of int4's layouts.
#pragma once

#include <cstdint>

#include "kernels/cpu/moe/moe.h"
#include "kernels/cpu/w4a16/int4.h"

namespace untorch::kernels::cpu {

// The rows of all experts below each other, packed as those of one weight [experts · n, k].
struct Int4Experts {
  std::int64_t n = 0, k = 0;  // of an expert; k is the weight's, a multiple of the group; n is one of 16
  const std::int32_t* weight = nullptr;
  const void* scales = nullptr;
  ScaleType scale_type = ScaleType::kFloat32;
  int inner_k_tiles = 8;  // for int4_linear's layout
  bool has_zeros = true;  // in w4a8_linear's
};

struct Int4Moe : Moe {
  Int4Experts w13, w2;  // [2·intermediate, k] and [k, intermediate]
  std::int64_t group = 32;
  // Int8 activations, and w4a8_linear's layout; else activations in float32, and int4_linear's.
  bool integers = false;
};

// As run_moe().
std::int64_t int4_moe(const Int4Moe& p);

}  // namespace untorch::kernels::cpu
