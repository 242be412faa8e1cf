// The contract of products with int4 weights, on any device.
#pragma once

#include "shims/matmul_checks.h"

namespace untorch::shims {

// Sizes of x [m, x_width] times a packed weight of n columns and k rows.
struct Int4Shape {
  std::int64_t m = 0, n = 0, k = 0, x_width = 0, group = 0;
  int inner_k_tiles = 8;
  Dims out_sizes;
};

// The weight and its scales alone, as int4_linear below takes them.
Int4Shape check_int4_weight(const char* op, const Tensor& weight, const Tensor& scales, std::int64_t group);

// aten::_weight_int4pack_mm: x bfloat16 [m, k], dense; weight int32 [n/8][k/(16·t)][32][t/2], dense; scales bfloat16
// [k/group][n][2], dense. Throws where that is not so; looks at no device.
Int4Shape check_int4pack(const char* op, const Tensor& x, const Tensor& weight, std::int64_t group,
                         const Tensor& scales);

// untorch::int4_linear: x float32, bfloat16 or float16 [.., x_width] with a dense last dimension, x_width <= k; scales
// of any of these dtypes; bias null or [n] of x's dtype, any stride.
Int4Shape check_int4_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scales,
                            std::int64_t group, const Tensor* bias);

}  // namespace untorch::shims
