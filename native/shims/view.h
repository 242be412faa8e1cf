// Views and shape changes, on any device.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

// Strides of `t` seen as `shape` (of as many elements) without a copy; false when there are none. Neighbouring
// dimensions that lie as one in memory may be split and joined freely, others may not.
bool view_strides(const Tensor& t, DimSpan shape, Dims& strides);

TensorPtr narrow(const Tensor& t, std::int64_t dim, std::int64_t start, std::int64_t length);
// Null bounds are the dimension's; others are wrapped and clamped.
TensorPtr slice(const Tensor& t, std::int64_t dim, const std::int64_t* start, const std::int64_t* end,
                std::int64_t step);
TensorPtr permute(const Tensor& t, DimSpan dims);
// A view, or a copy where there is none. One size may be -1.
TensorPtr reshape(const Tensor& t, DimSpan shape);
TensorPtr squeeze(const Tensor& t, std::int64_t dim);
TensorPtr view_as_real(const Tensor& t);
TensorPtr view_as_complex(const Tensor& t);
TensorPtr view_dtype(const Tensor& t, std::int32_t code);
// In place: the handle gets new sizes, and more memory with the same start where what it has is too small.
void resize(Tensor& t, DimSpan sizes, const std::int32_t* memory_format);
void resize_as(Tensor& t, const Tensor& model, const std::int32_t* memory_format);
void set_source(Tensor& t, const Tensor& from);

}  // namespace untorch::shims
