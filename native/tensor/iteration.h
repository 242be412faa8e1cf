// Iteration spaces over tensors: what elementwise kernels and kernels along one dimension take.
#pragma once

#include <vector>

#include "base/lanes.h"
#include "base/strided.h"
#include "tensor/tensor.h"

namespace untorch {

// The iteration space over operands with these strides (of `sizes`). Throws when it has too many dimensions.
template <int N>
Strided<N> strided(const char* op, DimSpan sizes, const DimSpan (&strides)[N]) {
  Strided<N> space;
  check(make_strided<N>(sizes, strides, space), op, ": shape ", to_string(sizes),
        " has more dimensions than the kernels take (", kMaxDims, " after merging)");
  return space;
}

// The iteration space over tensors that broadcast to `sizes`. Throws when it has too many dimensions.
template <int N>
Strided<N> strided(const char* op, DimSpan sizes, const Tensor* const (&tensors)[N]) {
  Dims strides[N];
  DimSpan spans[N];
  for (int n = 0; n < N; ++n) {
    const Tensor& t = *tensors[n];
    const std::size_t lead = sizes.size() - t.sizes().size();
    check(t.sizes().size() <= sizes.size(), op, ": shape ", to_string(t.sizes()), " does not broadcast to ",
          to_string(sizes));
    strides[n].resize(sizes.size());
    for (std::size_t d = lead; d < sizes.size(); ++d) {
      const std::int64_t size = t.sizes()[d - lead];
      check(size == sizes[d] || size == 1, op, ": shape ", to_string(t.sizes()), " does not broadcast to ",
            to_string(sizes));
      strides[n][d] = size == 1 ? 0 : t.strides()[d - lead];
    }
    spans[n] = strides[n];
  }
  return strided<N>(op, sizes, spans);
}

// Shape or strides without entry `dim`; a 0-D list stays empty.
std::vector<std::int64_t> without(DimSpan values, std::int64_t dim);
// Size and stride along `dim`; 1 and 1 for a 0-D tensor.
std::int64_t lane_size(const Tensor& t, std::int64_t dim);
std::int64_t lane_stride(const Tensor& t, std::int64_t dim);

// The rows along `dim` of operands that agree in the other dimensions; the last one is the input, whose row length
// counts. A 0-D tensor is one row of one element.
template <int N>
Lanes<N> lanes(const char* op, std::int64_t dim, const Tensor* const (&tensors)[N]) {
  Lanes<N> out;
  std::vector<std::int64_t> strides[N];
  std::span<const std::int64_t> spans[N];
  for (int k = 0; k < N; ++k) {
    out.step[k] = lane_stride(*tensors[k], dim);
    strides[k] = without(tensors[k]->strides(), dim);
    spans[k] = strides[k];
  }
  const Tensor& input = *tensors[N - 1];
  out.n = lane_size(input, dim);
  const auto sizes = without(input.sizes(), dim);
  check(make_strided<N>(sizes, spans, out.rows), op, ": shape ", to_string(input.sizes()),
        " has more dimensions than the kernels take (", kMaxDims, " after merging)");
  return out;
}

}  // namespace untorch
