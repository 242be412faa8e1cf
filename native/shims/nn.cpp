// The channels-last memory format and per-dimension argument lists.
#include "shims/nn.h"

#include <algorithm>

#include "tensor/device.h"

namespace untorch::shims {

bool suggests_channels_last(const Tensor& tensor) {
  const std::int64_t ndim = tensor.dim();
  if (ndim != 4 && ndim != 5) return false;
  if (tensor.stride(1) == 0) return false;
  std::int64_t least = 0;
  const auto visit = [&](std::int64_t d) {
    const std::int64_t size = tensor.size(d), stride = tensor.stride(d);
    if (size == 0 || stride < least) return false;
    if (d == 0 && least == tensor.stride(1)) return false;  // N11…1 and the like: both formats fit
    least = size > 1 ? stride * size : stride;
    return true;
  };
  if (!visit(1)) return false;
  for (std::int64_t d = ndim - 1; d >= 2; --d) {
    if (!visit(d)) return false;
  }
  return visit(0);
}

Dims channels_last_strides(DimSpan sizes) {
  Dims strides(sizes);
  const auto channels = std::max<std::int64_t>(sizes[1], 1);
  strides[1] = 1;
  std::int64_t step = channels;
  for (std::size_t d = sizes.size() - 1; d >= 2; --d) {
    strides[d] = step;
    step *= std::max<std::int64_t>(sizes[d], 1);
  }
  strides[0] = step;
  return strides;
}

TensorPtr empty_format(DimSpan sizes, DType dtype, bool channels_last, Device device) {
  if (!channels_last) return Tensor::empty(sizes, dtype, device);
  return Tensor::empty_strided(sizes, channels_last_strides(sizes), dtype, device);
}

TensorPtr channels_last_contiguous(const Tensor& src) {
  const Dims strides = channels_last_strides(src.sizes());
  bool same = true;
  for (std::size_t d = 0; d < strides.size(); ++d) {
    same = same && (src.sizes()[d] == 1 || src.strides()[d] == strides[d]);
  }
  if (same) return src.view(src.sizes(), strides, src.storage_offset());
  TensorPtr out = Tensor::empty_strided(src.sizes(), strides, src.dtype(), src.device());
  copy(*out, src);
  return out;
}

std::array<std::int64_t, 3> expand_list(DimSpan values, std::int64_t n, const char* op, const char* argument) {
  const auto count = static_cast<std::int64_t>(values.size());
  check(count == n || count == 1, op, ": argument '", argument, "' must have 1 or ", n, " values, got ",
        to_string(values));
  std::array<std::int64_t, 3> out{};
  for (std::int64_t d = 0; d < n; ++d) {
    out[static_cast<std::size_t>(d)] = values[count == 1 ? 0 : static_cast<std::size_t>(d)];
  }
  return out;
}

}  // namespace untorch::shims
