// Whether a tensor can be seen in another shape without a copy.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

// Strides of `t` seen as `shape` (of as many elements) without a copy; false when there are none. Neighbouring
// dimensions that lie as one in memory may be split and joined freely, others may not.
bool view_strides(const Tensor& t, DimSpan shape, Dims& strides);

}  // namespace untorch::shims
