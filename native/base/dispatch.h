// Calls a template lambda with the C++ type of a dtype.
#pragma once

#include <complex>

#include "base/dtype.h"
#include "base/error.h"
#include "base/half.h"

namespace untorch {

// dispatch_real("sort", t.dtype(), [&]<class T>() { … }): every real type, bool and the half types included.
template <class Fn>
decltype(auto) dispatch_real(const char* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kUInt8:
      return fn.template operator()<std::uint8_t>();
    case DType::kInt8:
      return fn.template operator()<std::int8_t>();
    case DType::kInt16:
      return fn.template operator()<std::int16_t>();
    case DType::kInt32:
      return fn.template operator()<std::int32_t>();
    case DType::kInt64:
      return fn.template operator()<std::int64_t>();
    case DType::kUInt16:
      return fn.template operator()<std::uint16_t>();
    case DType::kUInt32:
      return fn.template operator()<std::uint32_t>();
    case DType::kUInt64:
      return fn.template operator()<std::uint64_t>();
    case DType::kBool:
      return fn.template operator()<bool>();
    case DType::kFloat16:
      return fn.template operator()<Half>();
    case DType::kBFloat16:
      return fn.template operator()<BFloat16>();
    case DType::kFloat32:
      return fn.template operator()<float>();
    case DType::kFloat64:
      return fn.template operator()<double>();
    default:
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
  }
}

// dispatch_real and the complex types, as std::complex.
template <class Fn>
decltype(auto) dispatch_number(const char* op, DType dtype, Fn&& fn) {
  if (dtype == DType::kComplex64) return fn.template operator()<std::complex<float>>();
  if (dtype == DType::kComplex128) return fn.template operator()<std::complex<double>>();
  return dispatch_real(op, dtype, std::forward<Fn>(fn));
}
template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<std::complex<T>> = true;

// float16, bfloat16, float32, float64.
template <class Fn>
decltype(auto) dispatch_floating(const char* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat16:
      return fn.template operator()<Half>();
    case DType::kBFloat16:
      return fn.template operator()<BFloat16>();
    case DType::kFloat32:
      return fn.template operator()<float>();
    case DType::kFloat64:
      return fn.template operator()<double>();
    default:
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
                  " is not supported, expected a floating type");
  }
}

// By width only, for kernels that move elements. Fn gets an unsigned type of that many bytes, or Complex128.
template <class Fn>
decltype(auto) dispatch_width(const char* op, DType dtype, Fn&& fn) {
  switch (element_size(dtype)) {
    case 1:
      return fn.template operator()<std::uint8_t>();
    case 2:
      return fn.template operator()<std::uint16_t>();
    case 4:
      return fn.template operator()<std::uint32_t>();
    case 8:
      return fn.template operator()<std::uint64_t>();
    case 16:
      return fn.template operator()<Complex128>();
    default:
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported");
  }
}

// int32 and int64, the index types.
template <class Fn>
decltype(auto) dispatch_index(const char* op, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kInt32:
      return fn.template operator()<std::int32_t>();
    case DType::kInt64:
      return fn.template operator()<std::int64_t>();
    default:
      throw_error(ErrorKind::kUnsupported, op, ": index dtype ", dtype_name(dtype),
                  " is not supported, expected int32 or int64");
  }
}

// The type that sums and comparisons of T use: float for the half types, T otherwise.
template <class T>
struct ComputeType {
  using type = T;
};
template <>
struct ComputeType<Half> {
  using type = float;
};
template <>
struct ComputeType<BFloat16> {
  using type = float;
};
template <class T>
using compute_t = typename ComputeType<T>::type;

}  // namespace untorch
