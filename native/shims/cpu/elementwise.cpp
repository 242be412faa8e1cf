// Type promotion, broadcasting and output layout of element-wise operators.
#include "shims/cpu/elementwise.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tensor/device.h"

namespace untorch::shims {
namespace {

enum class Category { kBool, kInteger, kFloat, kComplex };

Category category(DType dtype) {
  if (is_complex(dtype)) return Category::kComplex;
  if (is_floating(dtype)) return Category::kFloat;
  return dtype == DType::kBool ? Category::kBool : Category::kInteger;
}

bool is_wide_unsigned(DType dtype) {
  return dtype == DType::kUInt16 || dtype == DType::kUInt32 || dtype == DType::kUInt64;
}

// Mixed integers: the wider wins, and uint8 with int8 needs int16.
DType promote_integers(DType a, DType b) {
  if (a == b) return a;
  const std::size_t sa = element_size(a), sb = element_size(b);
  if (sa == sb) return DType::kInt16;  // uint8 and int8
  return sa > sb ? a : b;
}

DType promote_floats(DType a, DType b) {
  if (a == b) return a;
  if (element_size(a) == element_size(b)) return DType::kFloat32;  // float16 and bfloat16
  return element_size(a) > element_size(b) ? a : b;
}

DType to_complex(DType floating) {
  switch (floating) {
    case DType::kFloat64:
      return DType::kComplex128;
    case DType::kFloat16:
      return DType::kComplex32;
    default:
      return DType::kComplex64;
  }
}

void check_promotable(DType dtype) {
  if (!is_known(dtype) || (category(dtype) == Category::kInteger && !is_integral(dtype))) {
    throw_error(ErrorKind::kUnsupported, "type promotion: dtype ", dtype_name(dtype), " is not supported");
  }
}

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

DType promote_types(DType a, DType b) {
  check_promotable(a);
  check_promotable(b);
  if (a == b) return a;
  const Category ca = category(a), cb = category(b);
  if ((is_wide_unsigned(a) && cb == Category::kInteger) || (is_wide_unsigned(b) && ca == Category::kInteger)) {
    throw_error(ErrorKind::kUnsupported, "type promotion: ", dtype_name(a), " and ", dtype_name(b),
                " have no common dtype; convert one of them first");
  }
  if (ca != cb && std::max(ca, cb) != Category::kComplex) return ca > cb ? a : b;
  if (std::max(ca, cb) == Category::kComplex) {
    if (ca == cb) return element_size(a) > element_size(b) ? a : b;
    const DType complex = ca == Category::kComplex ? a : b, other = ca == Category::kComplex ? b : a;
    if (category(other) != Category::kFloat) return complex;
    const DType needed = to_complex(other);
    return element_size(needed) > element_size(complex) ? needed : complex;
  }
  return ca == Category::kFloat ? promote_floats(a, b) : promote_integers(a, b);
}

DType result_type(const Tensor& a, const Tensor& b) {
  if ((a.dim() == 0) == (b.dim() == 0)) return promote_types(a.dtype(), b.dtype());
  const DType dimensioned = a.dim() == 0 ? b.dtype() : a.dtype(), zero_dim = a.dim() == 0 ? a.dtype() : b.dtype();
  check_promotable(dimensioned);
  check_promotable(zero_dim);
  if (category(zero_dim) <= category(dimensioned)) return dimensioned;
  if (category(zero_dim) == Category::kComplex && category(dimensioned) == Category::kFloat) {
    return to_complex(dimensioned);
  }
  return promote_types(dimensioned, zero_dim);
}

DType result_type_with_double(const Tensor& a) {
  check_promotable(a.dtype());
  return category(a.dtype()) >= Category::kFloat ? a.dtype() : DType::kFloat32;
}

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

void check_factory(const std::int32_t* layout, const std::int32_t* device, const char* op) {
  if (layout != nullptr && *layout != 0) {
    throw_error(ErrorKind::kUnsupported, op, ": layout code ", *layout, " is not supported, expected strided (0)");
  }
  if (device != nullptr && *device != 0) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'device' is ",
                device_name({static_cast<DeviceType>(*device), -1}), ", expected cpu");
  }
}

std::vector<std::int64_t> reduced_shape(DimSpan shape, std::int64_t dim, bool keepdim) {
  std::vector<std::int64_t> out(shape.begin(), shape.end());
  if (out.empty()) return out;
  if (!keepdim) return without(shape, dim);
  out[static_cast<std::size_t>(dim)] = 1;
  return out;
}

std::vector<std::int64_t> without(DimSpan values, std::int64_t dim) {
  std::vector<std::int64_t> out(values.begin(), values.end());
  if (!out.empty()) out.erase(out.begin() + dim);
  return out;
}

std::int64_t lane_size(const Tensor& t, std::int64_t dim) { return t.dim() == 0 ? 1 : t.size(dim); }
std::int64_t lane_stride(const Tensor& t, std::int64_t dim) { return t.dim() == 0 ? 1 : t.stride(dim); }

TensorPtr binary_result(const Tensor& a, const Tensor& b, DType dtype, const char* op) {
  const auto shape = broadcast_shapes(a.sizes(), b.sizes(), op);
  return Tensor::empty_strided(
      shape,
      elementwise_strides(shape, {broadcast_strides(a, shape, op, "self"), broadcast_strides(b, shape, op, "other")}),
      dtype, a.device().type != DeviceType::kCPU ? a.device() : b.device());
}

void check_alpha(DType dtype, double alpha, const char* op) {
  if (is_floating(dtype) || is_complex(dtype)) return;
  check(alpha == std::floor(alpha), op, ": 'alpha' is ", alpha, ", expected a whole number for dtype ",
        dtype_name(dtype));
}

TensorPtr scalar_tensor(double value, DType dtype) {
  const TensorPtr wide = Tensor::scalar(value, DType::kFloat64);
  TensorPtr out = Tensor::empty(DimSpan{}, dtype);
  copy_cpu(*out, *wide);
  return out;
}

void fill(const Tensor& t, double value) { copy_cpu(t, *scalar_tensor(value, t.dtype())); }

}  // namespace untorch::shims
