// Iteration spaces over tensors.
#include "tensor/iteration.h"

namespace untorch {

std::vector<std::int64_t> without(DimSpan values, std::int64_t dim) {
  std::vector<std::int64_t> out(values.begin(), values.end());
  if (!out.empty()) out.erase(out.begin() + dim);
  return out;
}

std::int64_t lane_size(const Tensor& t, std::int64_t dim) { return t.dim() == 0 ? 1 : t.size(dim); }
std::int64_t lane_stride(const Tensor& t, std::int64_t dim) { return t.dim() == 0 ? 1 : t.stride(dim); }

}  // namespace untorch
