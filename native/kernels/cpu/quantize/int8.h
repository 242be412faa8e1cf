// A weight in int8 on the CPU, with a scale for each row.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace untorch::kernels {

// A weight [rows, k] of finite values; w becomes q · scale, q from -127 to 127, scale the largest |w| / 127.
struct Int8Quantization {
  std::int64_t rows, k;
  DType dtype;         // float32, bfloat16 or float16
  const void* weight;  // rows `stride` elements apart
  std::int64_t stride;
  std::int8_t* values;  // [rows][k]
  float* scales;        // [rows]
  double* sums;         // [rows][2]: the squares of the errors, and of the weights
};

// The result does not depend on the number of threads.
void quantize_int8(const Int8Quantization& p);

}  // namespace untorch::kernels
