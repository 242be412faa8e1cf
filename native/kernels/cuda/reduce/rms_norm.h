// out = x / sqrt(mean(x²) + eps) * weight over rows, and the reciprocal root itself.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// x and out: row-major [rows, width]. weight: [width], of x's dtype or the computing one (float; double for double);
// null for none. reciprocal: [rows] in the computing dtype.
int rms_norm(const void* x, DType dtype, const void* weight, DType weight_dtype, std::int64_t rows, std::int64_t width,
             double eps, void* out, void* reciprocal, Stream stream);

}  // namespace untorch::kernels::cuda
