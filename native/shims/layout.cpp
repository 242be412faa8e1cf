// The memory layouts that PyTorch gives to results.
#include "shims/layout.h"

#include <algorithm>

namespace untorch::shims {

Dims strides_like(const Tensor& tensor) {
  const std::int64_t ndim = tensor.dim();
  const Dims &sizes = tensor.sizes(), &strides = tensor.strides();
  Dims order;
  order.resize(static_cast<std::size_t>(ndim));
  // Dense: sorted by stride, with dimensions of size 1 left out, each stride is the product of the sizes before it.
  for (std::int64_t d = 0; d < ndim; ++d) order[static_cast<std::size_t>(d)] = d;
  const auto at = [](const Dims& dims, std::int64_t d) { return dims[static_cast<std::size_t>(d)]; };
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t x, std::int64_t y) {
    if (at(sizes, x) < 2 || at(sizes, y) < 2) return at(sizes, x) >= 2 && at(sizes, y) < 2;
    return at(strides, x) < at(strides, y);
  });
  std::int64_t expected = 1;
  bool dense = true;
  for (const std::int64_t d : order) {
    if (at(sizes, d) < 2) break;
    dense = dense && at(strides, d) == expected;
    expected *= at(sizes, d);
  }
  if (dense || tensor.numel() == 0) return tensor.numel() == 0 ? contiguous_strides(sizes) : strides;
  // Insertion from the last dimension outwards; a stride of 0 is ordered with nothing and stays where it is.
  for (std::int64_t i = 0; i < ndim; ++i) order[static_cast<std::size_t>(i)] = ndim - 1 - i;
  const auto compare = [&](std::int64_t x, std::int64_t y) -> int {
    const std::int64_t a = at(strides, x), b = at(strides, y);
    if (a == 0 || b == 0) return 0;
    if (a != b) return a < b ? -1 : 1;
    return at(sizes, x) > at(sizes, y) ? 1 : 0;
  };
  for (std::size_t i = 1; i < order.size(); ++i) {
    std::size_t place = i;
    for (std::size_t j = i; j-- > 0;) {
      const int relation = compare(order[j], order[place]);
      if (relation > 0) {
        std::swap(order[j], order[place]);
        place = j;
      } else if (relation < 0) {
        break;
      }
    }
  }
  Dims out;
  out.resize(order.size());
  std::int64_t next = 1;
  for (const std::int64_t d : order) {
    out[static_cast<std::size_t>(d)] = next;
    next *= at(sizes, d);
  }
  return out;
}

}  // namespace untorch::shims
