// Products of floating-point rows with int8 weights, a scale for every column.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// out[i, j] = scales[j] · sum over c of x[i, c] · weight[j, c]; everything dense row-major, weight int8 [n, k], the
// rest of `dtype` (float32, float16, bfloat16). Sums run in float32 in a fixed order.
int gemm_int8(std::int64_t m, std::int64_t n, std::int64_t k, DType dtype, const void* x, const void* weight,
              const void* scales, void* out, Stream stream);
// out[i, j] = product[i, j] · scales[j], product being float32.
int scale_columns(std::int64_t m, std::int64_t n, DType dtype, const float* product, const void* scales, void* out,
                  Stream stream);

}  // namespace untorch::kernels::cuda
