// The memory layouts that PyTorch gives to results.
#pragma once

#include "tensor/tensor.h"

namespace untorch::shims {

// The strides that PyTorch gives to a new tensor "like" this one: its own where they are dense and do not overlap, else
// the dense strides in the same order of dimensions. Compiled models rely on them.
Dims strides_like(const Tensor& tensor);

}  // namespace untorch::shims
