// The contract of _fused_rms_norm, the same on every device.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

struct RmsNormShape {
  std::int64_t width = 1;  // elements that are normalised together
  Dims reciprocal;         // the shape of the reciprocal roots: 1 in the normalised dimensions
};

inline RmsNormShape rms_norm_shape(const char* op, const Tensor& x, const Tensor* weight, DimSpan shape) {
  const auto n = static_cast<std::int64_t>(shape.size());
  check(n >= 1 && n <= x.dim(), op, ": argument 'normalized_shape' must have 1 to ", x.dim(), " values, got ",
        to_string(shape));
  RmsNormShape out{1, x.sizes()};
  for (std::int64_t d = 0; d < n; ++d) {
    check(x.size(d - n) == shape[static_cast<std::size_t>(d)], op, ": argument 'input' must end in ", to_string(shape),
          ", got shape ", to_string(x.sizes()));
    out.width *= x.size(d - n);
    out.reciprocal[out.reciprocal.size() - static_cast<std::size_t>(n - d)] = 1;
  }
  check(weight == nullptr || to_string(weight->sizes()) == to_string(shape), op, ": argument 'weight' must have shape ",
        to_string(shape), ", got ", weight == nullptr ? "" : std::string(to_string(weight->sizes())));
  return out;
}

}  // namespace untorch::shims
