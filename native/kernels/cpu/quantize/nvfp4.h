// A weight in NVFP4 on the CPU: a scale in E4M3 for each block of 16, and codes in E2M1.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace untorch::kernels {

inline constexpr std::int64_t kNvfp4Block = 16;

// A weight [rows, k] of finite values; w becomes e2m1 · block_scale · global_scale. What is behind k counts as 0.
struct Nvfp4Quantization {
  std::int64_t rows, k;
  DType dtype;         // float32, bfloat16 or float16
  const void* weight;  // rows `stride` elements apart
  std::int64_t stride;
  const float* global_scale;  // [rows], above 0
  bool search;                // for each block the scale of least squared error; else that of its largest value
  std::int64_t blocks;
  std::uint8_t* packed;       // [rows][blocks · 8], the even k in the lower nibble
  std::uint8_t* block_scale;  // [rows][blocks]
  double* sums;               // [rows][3]: the squares of the errors, of those without the search, and of the weights
};

// The result does not depend on the number of threads.
void quantize_nvfp4(const Nvfp4Quantization& p);

}  // namespace untorch::kernels
