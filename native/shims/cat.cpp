// Concatenation.
#include <algorithm>

#include "kernels/cat_pad.h"
#include "shims/nn.h"
#include "shims/op.h"
#include "shims/promotion.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct Concatenation {
  std::vector<const Tensor*> parts;  // without those that are skipped: 1-D tensors of no elements
  std::vector<std::int64_t> starts;  // of each part along `dim`
  DType dtype = DType::kFloat32;
  std::size_t dim = 0;
  Dims shape, strides;  // of the result

  // The view of the result that takes part i.
  TensorPtr place(const Tensor& out, std::size_t i) const {
    return out.view(parts[i]->sizes(), out.strides(), out.numel() == 0 ? 0 : starts[i] * out.strides()[dim]);
  }
};

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

Concatenation check_cat(const Op& op, const std::vector<const Tensor*>& tensors, std::int64_t dim_arg) {
  check(!tensors.empty(), op, ": expected at least one tensor");
  const auto skipped = [](const Tensor& t) { return t.dim() == 1 && t.numel() == 0; };
  const Tensor* model = nullptr;
  Concatenation out;
  out.dtype = tensors[0]->dtype();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    check(tensors[i]->dim() > 0, op, ": tensor ", i, " is 0-D and cannot be concatenated");
    if (model == nullptr && !skipped(*tensors[i])) model = tensors[i];
    out.dtype = promote_types(out.dtype, tensors[i]->dtype());
  }
  const Tensor& first = model == nullptr ? *tensors[0] : *model;
  out.dim = static_cast<std::size_t>(normalize_dim(dim_arg, first.dim(), op));
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
    check(fits, op, ": tensor ", i, " has shape ", to_string(part.sizes()), ", expected ", to_string(first.sizes()),
          " except in dimension ", out.dim);
    out.parts.push_back(&part);
    out.starts.push_back(out.shape[out.dim]);
    out.shape[out.dim] += part.sizes()[out.dim];
  }
  check(is_known(out.dtype) && element_size(out.dtype) <= 16, op, ": dtype ", dtype_name(out.dtype),
        " is not supported");
  out.strides = channels_last ? channels_last_strides(out.shape) : contiguous_strides(out.shape);
  return out;
}

// Dense parts of the result's dtype and row-major order go in one launch; others are copied one by one.
template <class On>
void concatenate(const On& on, const Concatenation& plan, const Tensor& out) {
  if (out.numel() == 0) return;
  std::int64_t rows = 1, inner = 1;
  for (std::size_t d = 0; d < plan.shape.size(); ++d)
    (d < plan.dim ? rows : inner) *= d == plan.dim ? 1 : plan.shape[d];
  const int bytes = static_cast<int>(element_size(plan.dtype));
  kernels::cuda::Pieces pieces;
  pieces.rows = rows;
  pieces.pitch = plan.shape[plan.dim] * inner;
  const auto flush = [&] {
    on.launched(kernels::cuda::concatenate(pieces, out.raw(), bytes, on.stream()));
    pieces.count = 0;
  };
  const bool row_major = out.is_contiguous();
  for (std::size_t i = 0; i < plan.parts.size(); ++i) {
    const Tensor& part = *plan.parts[i];
    if (part.numel() == 0) continue;
    if (!row_major || part.dtype() != plan.dtype || !part.is_contiguous()) {
      copy(*plan.place(out, i), part);
      continue;
    }
    if (pieces.count == kernels::cuda::kMaxPieces) flush();
    pieces.piece[pieces.count++] = {part.raw(), part.sizes()[plan.dim] * inner, plan.starts[i] * inner};
  }
  if (pieces.count != 0) flush();
}

}  // namespace

UNTORCH_OP(cat, (const AtenTensorHandle* tensors, std::int64_t tensors_len, std::int64_t dim, AtenTensorHandle* ret0),
           tensors, tensors_len, dim, ret0) {
  std::vector<const Tensor*> parts;
  for (std::int64_t i = 0; i < tensors_len; ++i) {
    parts.push_back(&op.input(tensors[i], "tensors"));
    check(parts.back()->device() == parts[0]->device(), op, ": tensor ", i, " is on ",
          device_name(parts.back()->device()), ", tensor 0 on ", device_name(parts[0]->device()),
          ", expected one device");
  }
  const Concatenation plan = check_cat(op, parts, dim);
  TensorPtr out = Tensor::empty_strided(plan.shape, plan.strides, plan.dtype, parts[0]->device());
  run(
      op, {parts[0]},
      [&] {
        for (std::size_t i = 0; i < plan.parts.size(); ++i) copy_cpu(*plan.place(*out, i), *plan.parts[i]);
      },
      [&](const auto& on) { concatenate(on, plan, *out); });
  give(ret0, std::move(out), op);
}
