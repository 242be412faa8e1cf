// SwiGLU of merged gate and up projections: out = silu(gate) · up.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// In float32, rounded once.
struct SiluAndMul {
  DType dtype = DType::kBFloat16;  // bfloat16, float16 or float32
  std::int64_t rows = 0, width = 0;
  const void* gate_up = nullptr;  // dense [rows, 2 · width], the gate first
  void* out = nullptr;            // dense [rows, width]
  bool pdl = false;               // launch with programmatic stream serialization: Launch::pdl
};
int silu_and_mul(const SiluAndMul& p, Stream stream);

}  // namespace untorch::kernels::cuda
