// The order of values: NaN counts as the largest, as in PyTorch.
#pragma once

#include <cmath>
#include <type_traits>

#include "base/dispatch.h"

namespace untorch::kernels {

template <class T>
inline bool is_nan(T value) {
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return std::isnan(static_cast<compute_t<T>>(value));
  }
}

// a before b in ascending order; NaNs are equal to each other and after everything else.
template <class T>
inline bool less_nan_last(T a, T b) {
  return (!is_nan(a) && is_nan(b)) || static_cast<compute_t<T>>(a) < static_cast<compute_t<T>>(b);
}

}  // namespace untorch::kernels
