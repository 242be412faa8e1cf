// Type promotion as PyTorch does it.
#include "shims/promotion.h"

#include <algorithm>

#include "tensor/copy.h"

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

TensorPtr scalar_tensor(double value, DType dtype) {
  const TensorPtr wide = Tensor::scalar(value, DType::kFloat64);
  TensorPtr out = Tensor::empty(DimSpan{}, dtype);
  copy(*out, *wide);
  return out;
}

}  // namespace untorch::shims
