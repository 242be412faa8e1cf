// What the random operators of every device check and see alike.
#pragma once

#include <limits>

#include "shims/shim.h"

namespace untorch::shims {

// A complex tensor as a real one with a last dimension of 2; others unchanged.
inline Tensor real_view(const Tensor& t) {
  if (t.dtype() != DType::kComplex64 && t.dtype() != DType::kComplex128) return t;
  std::vector<std::int64_t> sizes(t.sizes().begin(), t.sizes().end()), strides;
  for (const std::int64_t stride : t.strides()) strides.push_back(stride * 2);
  sizes.push_back(2);
  strides.push_back(1);
  const DType dtype = t.dtype() == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
  return {t.storage(), t.storage_offset() * 2, dtype, sizes, strides};
}

// A range [low, high) of integers that is not empty and fits the dtype.
inline void check_integer_range(DType dtype, std::int64_t low, std::int64_t high, const char* op) {
  check(low < high, op, ": 'low' is ", low, ", expected less than 'high' ", high);
  dispatch_real(op, dtype, [&]<class T>() {
    if constexpr (std::is_integral_v<T>) {
      const bool fits = std::is_same_v<T, std::uint64_t>
                            ? low >= 0
                            : low >= static_cast<std::int64_t>(std::numeric_limits<T>::lowest()) &&
                                  high - 1 <= static_cast<std::int64_t>(std::numeric_limits<T>::max());
      check(fits, op, ": the range [", low, ", ", high, ") does not fit dtype ", dtype_name(dtype));
    }
  });
}

}  // namespace untorch::shims
