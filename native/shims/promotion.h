// Type promotion as PyTorch does it.
#pragma once

#include "tensor/tensor.h"

namespace untorch::shims {

// The dtype that holds both, as torch.promote_types. Refuses pairs that PyTorch refuses (uint16 and up with others).
DType promote_types(DType a, DType b);
// torch.result_type of two tensors: a 0-D tensor only counts when its category (bool, integer, float, complex) is
// higher.
DType result_type(const Tensor& a, const Tensor& b);
// torch.result_type of a tensor and a Python float.
DType result_type_with_double(const Tensor& a);
// A 0-D tensor of a double on the CPU, converted.
TensorPtr scalar_tensor(double value, DType dtype);

}  // namespace untorch::shims
