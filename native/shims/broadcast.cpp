// Broadcasting and reduced shapes.
#include "shims/broadcast.h"

#include <algorithm>

#include "tensor/iteration.h"

namespace untorch::shims {

std::vector<std::int64_t> broadcast_shapes(DimSpan a, DimSpan b, const char* op) {
  std::vector<std::int64_t> out(std::max(a.size(), b.size()));
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::int64_t sa = i < a.size() ? a[a.size() - 1 - i] : 1, sb = i < b.size() ? b[b.size() - 1 - i] : 1;
    check(sa == sb || sa == 1 || sb == 1, op, ": shapes ", to_string(a), " and ", to_string(b),
          " do not broadcast together");
    out[out.size() - 1 - i] = sa == 1 ? sb : sa;
  }
  return out;
}

std::vector<std::int64_t> broadcast_strides(const Tensor& t, DimSpan shape, const char* op, const char* argument) {
  const std::size_t ndim = t.sizes().size();
  std::vector<std::int64_t> out(shape.size(), 0);
  bool fits = ndim <= shape.size();
  for (std::size_t i = 0; fits && i < ndim; ++i) {
    const std::size_t d = shape.size() - 1 - i, s = ndim - 1 - i;
    fits = t.sizes()[s] == shape[d] || t.sizes()[s] == 1;
    out[d] = t.sizes()[s] == 1 && shape[d] != 1 ? 0 : t.strides()[s];
  }
  check(fits, op, ": '", argument, "' of shape ", to_string(t.sizes()), " does not broadcast to ", to_string(shape));
  return out;
}

Tensor expand(const Tensor& t, DimSpan shape, const char* op, const char* argument) {
  return {t.storage(), t.storage_offset(), t.dtype(), shape, broadcast_strides(t, shape, op, argument)};
}

std::vector<std::int64_t> reduced_shape(DimSpan shape, std::int64_t dim, bool keepdim) {
  std::vector<std::int64_t> out(shape.begin(), shape.end());
  if (out.empty()) return out;
  if (!keepdim) return without(shape, dim);
  out[static_cast<std::size_t>(dim)] = 1;
  return out;
}

}  // namespace untorch::shims
