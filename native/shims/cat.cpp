// The shape, dtype and layout of a concatenation.
#include "shims/cat.h"

#include <algorithm>

#include "shims/cpu/elementwise.h"
#include "shims/nn.h"

namespace untorch::shims {
namespace {

// Strides that grow in the order W, H (D), C last: PyTorch's test for "channels last".
bool is_channels_last(const Tensor& t) {
  if ((t.dim() != 4 && t.dim() != 5) || t.strides()[1] == 0) return false;
  std::vector<std::size_t> order{1};
  for (std::size_t d = t.sizes().size(); d-- > 2;) order.push_back(d);
  order.push_back(0);
  std::int64_t least = 0;
  for (const std::size_t d : order) {
    if (t.sizes()[d] == 0 || t.strides()[d] < least) return false;
    if (d == 0 && least == t.strides()[1]) return false;
    least = t.strides()[d] * std::max<std::int64_t>(t.sizes()[d], 1);
  }
  return true;
}

}  // namespace

TensorPtr Concatenation::place(const Tensor& out, std::size_t i) const {
  return out.view(parts[i]->sizes(), out.strides(), out.numel() == 0 ? 0 : starts[i] * out.strides()[dim]);
}

Concatenation check_cat(const std::vector<const Tensor*>& tensors, std::int64_t dim_arg) {
  check(!tensors.empty(), "cat: expected at least one tensor");
  const auto skipped = [](const Tensor& t) { return t.dim() == 1 && t.numel() == 0; };
  const Tensor* model = nullptr;
  Concatenation out;
  out.dtype = tensors[0]->dtype();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(tensors[i]->dim() > 0, "cat: tensor ", i, " is 0-D and cannot be concatenated");
    if (model == nullptr && !skipped(*tensors[i])) model = tensors[i];
    out.dtype = promote_types(out.dtype, tensors[i]->dtype());
  }
  const Tensor& first = model == nullptr ? *tensors[0] : *model;
  out.dim = static_cast<std::size_t>(normalize_dim(dim_arg, first.dim(), "cat"));
  out.shape = first.sizes();
  out.shape[out.dim] = 0;
  bool channels_last = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& part = *tensors[i];
    channels_last = channels_last && is_channels_last(part);
    if (skipped(part)) continue;
    bool fits = part.dim() == first.dim();
    for (std::size_t d = 0; fits && d < out.shape.size(); ++d) {
      fits = d == out.dim || part.sizes()[d] == first.sizes()[d];
    }
    check(fits, "cat: tensor ", i, " has shape ", to_string(part.sizes()), ", expected ", to_string(first.sizes()),
          " except in dimension ", out.dim);
    out.parts.push_back(&part);
    out.starts.push_back(out.shape[out.dim]);
    out.shape[out.dim] += part.sizes()[out.dim];
  }
  out.strides = channels_last ? channels_last_strides(out.shape) : contiguous_strides(out.shape);
  return out;
}

}  // namespace untorch::shims
