// Broadcasting and reduced shapes.
#pragma once

#include <vector>

#include "tensor/tensor.h"

namespace untorch::shims {

std::vector<std::int64_t> broadcast_shapes(DimSpan a, DimSpan b, const char* op);
// Strides of `t` seen as `shape`: 0 where it is repeated. The shape must be one that t broadcasts to.
std::vector<std::int64_t> broadcast_strides(const Tensor& t, DimSpan shape, const char* op, const char* argument);
// `t` as a view of that shape.
Tensor expand(const Tensor& t, DimSpan shape, const char* op, const char* argument);
// The shape reduced along `dim`: removed, or 1 with keepdim. 0-D stays 0-D.
std::vector<std::int64_t> reduced_shape(DimSpan shape, std::int64_t dim, bool keepdim);

}  // namespace untorch::shims
