// How two values of a reduction combine, where they start, and what a mean divides by.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/dispatch.h"
#include "kernels/cpu/common/order.h"
#include "kernels/reduce_op.h"

namespace untorch::kernels {

template <class T>
T reduce_identity(ReduceOp reduce) {
  using Limits = std::numeric_limits<compute_t<T>>;
  switch (reduce) {
    case ReduceOp::kProd:
      return static_cast<T>(compute_t<T>(1));
    case ReduceOp::kMax:
      return static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    case ReduceOp::kMin:
      return static_cast<T>(Limits::has_infinity ? Limits::infinity() : Limits::max());
    default:
      return static_cast<T>(compute_t<T>(0));
  }
}

// NaN wins over everything in the extrema.
template <class T>
T combine(ReduceOp reduce, T a, T b) {
  using Wide = compute_t<T>;
  switch (reduce) {
    case ReduceOp::kProd:
      if constexpr (std::is_same_v<T, bool>) {
        return a && b;
      } else {
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
      }
    case ReduceOp::kMax:
      return is_nan(b) || static_cast<Wide>(a) < static_cast<Wide>(b) ? b : a;
    case ReduceOp::kMin:
      return is_nan(b) || static_cast<Wide>(b) < static_cast<Wide>(a) ? b : a;
    default:
      if constexpr (std::is_same_v<T, bool>) {
        return a || b;
      } else {
        return static_cast<T>(static_cast<Wide>(a) + static_cast<Wide>(b));
      }
  }
}

// Integers round the mean down, as in PyTorch.
template <class T>
T divide_by_count(T sum, std::int64_t count) {
  if constexpr (std::is_same_v<T, bool>) {
    return sum;
  } else if constexpr (std::is_integral_v<T>) {
    // The count may not fit T (int8 with 200 values), and a negative sum may not become unsigned.
    const auto wide = static_cast<std::int64_t>(sum);
    const std::int64_t quotient = wide / count;
    return static_cast<T>(quotient - (wide % count < 0 ? 1 : 0));
  } else {
    return static_cast<T>(static_cast<compute_t<T>>(sum) / static_cast<compute_t<T>>(count));
  }
}

}  // namespace untorch::kernels
