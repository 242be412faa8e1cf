// SwiGLU of the MoE kernels' epilogues.
#pragma once

#include "kernels/cuda/moe/w4a16_moe.h"

namespace untorch::kernels::cuda {

// SwiGLU of a gate and its up. The branch is uniform.
__device__ __forceinline__ float swiglu(const SwiGlu& params, float gate, float up) {
  const float alpha = params.alpha, beta = params.beta, limit = params.limit;
  if (alpha == 1.0f && beta == 0.0f && limit == kNoLimit) return gate / (1.0f + expf(-gate)) * up;
  // NaN fails the comparisons, and stays.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return gate / (1.0f + expf(-alpha * gate)) * (up + beta);
}

}  // namespace untorch::kernels::cuda
