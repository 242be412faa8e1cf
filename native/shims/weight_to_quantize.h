// The weight that the quantising shims take.
#pragma once

#include "shims/op.h"

namespace untorch::shims {

// float32, bfloat16 or float16 [rows, columns], rows of any distance.
inline const Tensor& weight_to_quantize(AtenTensorHandle weight, const char* op) {
  const Tensor& given = cpu_input(weight, op, "weight");
  const DType dtype = given.dtype();
  check((dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16) && given.dim() == 2 &&
            (given.size(1) <= 1 || given.stride(1) == 1),
        op, ": argument 'weight' must be floating point of two dimensions, the last one dense, got ", dtype_name(dtype),
        " of shape ", to_string(given.sizes()));
  return given;
}

}  // namespace untorch::shims
