// Conversions to FP8 E4M3 by pairs: the GPU's own from sm_89 on, fp8_rows.h's before.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/quantize/fp8_rows.h"

namespace untorch::kernels::cuda {

// To nearest even, magnitudes up to 464: two bytes, the first value's lower. NaN stays NaN; what is larger is either
// 448 or NaN.
__device__ __forceinline__ std::uint32_t e4m3_of_pair(float first, float second) {
#if __CUDA_ARCH__ >= 890
  unsigned short bytes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  return bytes;
#else
  return e4m3_of(first) | e4m3_of(second) << 8;
#endif
}

// Eight values times `factor`.
__device__ __forceinline__ uint2 e4m3_of_eight(const float (&values)[8], float factor) {
  std::uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = e4m3_of_pair(values[2 * i] * factor, values[2 * i + 1] * factor);
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

}  // namespace untorch::kernels::cuda
