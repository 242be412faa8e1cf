// The memory layouts that PyTorch gives to results.
#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace untorch::shims {

// The strides that PyTorch gives to a new tensor "like" this one: its own where they are dense and do not overlap, else
// the dense strides in the same order of dimensions. Compiled models rely on them.
Dims strides_like(const Tensor& tensor);

// No two elements overlap and no gaps lie between them.
bool is_dense(DimSpan sizes, DimSpan strides);
// The strides that PyTorch gives the result of an elementwise operator with these operands (of the result's shape).
Dims elementwise_strides(DimSpan shape, const std::vector<std::vector<std::int64_t>>& operands);
// The result tensor of an elementwise operator on a and b. On a GPU when either is.
TensorPtr binary_result(const Tensor& a, const Tensor& b, DType dtype, const char* op);
// A new tensor laid out like `t`: its strides when it is dense, else the order of its dimensions. On t's device.
TensorPtr empty_like(const Tensor& t, DType dtype);
// empty_like and copied.
TensorPtr clone_like(const Tensor& t);
// empty_like under an optional memory_format code (absent or preserve: like `t`).
TensorPtr empty_like_format(const Tensor& t, DType dtype, const std::int32_t* memory_format, const char* op);

}  // namespace untorch::shims
