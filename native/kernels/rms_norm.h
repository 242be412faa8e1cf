// RMSNorm over rows: x / sqrt(mean(x²) + eps) * weight, and the reciprocal root itself; on CUDA with a residual sum.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels {

// The half types compute in float32, the others in their own type.
struct RmsNorm {
  DType dtype{};  // of x and out: float16, bfloat16, float32 or float64
  std::int64_t rows = 0, width = 0;
  double eps = 0;
  const void* x = nullptr;       // row-major [rows, width], as out
  const void* weight = nullptr;  // [width], or null
  DType weight_dtype{};          // the computing dtype; on CUDA also that of x
  void* out = nullptr;
  void* reciprocal = nullptr;  // [rows] in the computing dtype; on CUDA it may be null
  // On CUDA, not for float64, and with a weight of x's dtype: x + added [rows, width], rounded to dtype, is normalised
  // and written to `sum`, which may be x or `added`.
  const void* added = nullptr;
  void* sum = nullptr;
  bool pdl = false;  // launch with programmatic stream serialization: Launch::pdl
};

namespace cpu {
void rms_norm(const RmsNorm& p);
}
namespace cuda {
int rms_norm(const RmsNorm& p, Stream stream);
}

}  // namespace untorch::kernels
