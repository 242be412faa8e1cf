// What cat makes of its arguments, on any device.
#pragma once

#include <vector>

#include "shims/shim.h"

namespace untorch::shims {

struct Concatenation {
  std::vector<const Tensor*> parts;  // without those that are skipped: 1-D tensors of no elements
  std::vector<std::int64_t> starts;  // of each part along `dim`
  DType dtype = DType::kFloat32;
  std::size_t dim = 0;
  Dims shape, strides;  // of the result

  // The view of the result that takes part i.
  TensorPtr place(const Tensor& out, std::size_t i) const;
};

Concatenation check_cat(const std::vector<const Tensor*>& tensors, std::int64_t dim);

}  // namespace untorch::shims
