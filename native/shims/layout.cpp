// The memory layouts that PyTorch gives to results.
#include "shims/layout.h"

#include <algorithm>
#include <numeric>

#include "shims/broadcast.h"
#include "tensor/copy.h"

namespace untorch::shims {
namespace {

// Which of the strides' orders comes first: PyTorch compares two dimensions operand by operand, the first that differs
// (and is not broadcast) decides, and equal strides put the smaller size inside.
int compare_dims(std::size_t a, std::size_t b, DimSpan shape, const std::vector<std::vector<std::int64_t>>& operands) {
  for (const auto& strides : operands) {
    if (strides[a] == 0 || strides[b] == 0) continue;
    if (strides[a] != strides[b]) return strides[a] < strides[b] ? -1 : 1;
    if (shape[a] > shape[b]) return 1;
  }
  return 0;
}

}  // namespace

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

bool is_dense(DimSpan sizes, DimSpan strides) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return true;
    if (sizes[i] != 1) order.push_back(i);
  }
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return strides[a] < strides[b]; });
  std::int64_t expected = 1;
  for (const std::size_t d : order) {
    if (strides[d] != expected) return false;
    expected *= sizes[d];
  }
  return true;
}

Dims elementwise_strides(DimSpan shape, const std::vector<std::vector<std::int64_t>>& operands) {
  const std::size_t ndim = shape.size();
  // Operands of one dense layout hand it on unchanged, also where sizes of 1 leave the order open.
  const bool same = !operands.empty() && std::all_of(operands.begin(), operands.end(),
                                                     [&](const auto& strides) { return strides == operands.front(); });
  if (same && is_dense(shape, operands.front())) {
    const Tensor probe({}, 0, DType::kFloat32, shape, operands.front());
    return probe.is_contiguous() ? contiguous_strides(shape) : Dims(DimSpan(operands.front()));
  }
  std::vector<std::size_t> order(ndim);  // innermost first
  for (std::size_t i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  for (std::size_t i = 1; i < ndim; ++i) {
    std::size_t moving = i;
    for (std::size_t j = i; j-- > 0;) {
      const int order_of = compare_dims(order[j], order[moving], shape, operands);
      if (order_of > 0) {
        std::swap(order[j], order[moving]);
        moving = j;
      } else if (order_of < 0) {
        break;
      }
    }
  }
  Dims strides;
  strides.resize(ndim);
  std::int64_t running = 1;
  for (const std::size_t d : order) {
    strides[d] = running;
    running *= std::max<std::int64_t>(shape[d], 1);
  }
  return strides;
}

TensorPtr empty_like(const Tensor& t, DType dtype) {
  if (t.numel() != 0 && is_dense(t.sizes(), t.strides())) {
    return Tensor::empty_strided(t.sizes(), t.strides(), dtype, t.device());
  }
  const std::vector<std::int64_t> strides(t.strides().begin(), t.strides().end());
  return Tensor::empty_strided(t.sizes(), elementwise_strides(t.sizes(), {strides}), dtype, t.device());
}

TensorPtr clone_like(const Tensor& t) {
  TensorPtr out = empty_like(t, t.dtype());
  copy(*out, t);
  return out;
}

TensorPtr empty_like_format(const Tensor& t, DType dtype, const std::int32_t* memory_format, const char* op) {
  const std::int32_t format = memory_format == nullptr ? 1 : *memory_format;
  if (format == 1) return empty_like(t, dtype);
  if (format == 0) return Tensor::empty(t.sizes(), dtype, t.device());
  check(format == 2 || format == 3, op, ": unknown memory format code ", format);
  const std::int64_t ndim = format == 2 ? 4 : 5;
  check(t.dim() == ndim, op, ": memory format channels_last", format == 2 ? "" : "_3d", " needs a ", ndim,
        "-D tensor, got ", t.dim(), "-D");
  Dims strides;
  strides.resize(static_cast<std::size_t>(ndim));
  strides[1] = 1;
  std::int64_t running = std::max<std::int64_t>(t.sizes()[1], 1);
  for (std::size_t d = static_cast<std::size_t>(ndim); d-- > 2;) {
    strides[d] = running;
    running *= std::max<std::int64_t>(t.sizes()[d], 1);
  }
  strides[0] = running;
  return Tensor::empty_strided(t.sizes(), strides, dtype, t.device());
}

TensorPtr binary_result(const Tensor& a, const Tensor& b, DType dtype, const char* op) {
  const auto shape = broadcast_shapes(a.sizes(), b.sizes(), op);
  return Tensor::empty_strided(
      shape,
      elementwise_strides(shape, {broadcast_strides(a, shape, op, "self"), broadcast_strides(b, shape, op, "other")}),
      dtype, a.device().type != DeviceType::kCPU ? a.device() : b.device());
}

}  // namespace untorch::shims
