// The reductions of scatter_reduce, index_reduce and segment_reduce: how two values combine and where they start.
#pragma once

#include <cmath>
#include <limits>
#include <string_view>

#include "kernels/cpu/sort/sort.h"
#include "shims/shim.h"

namespace untorch::shims {

enum class Reduce { kSum, kProd, kMean, kAMax, kAMin };

inline Reduce parse_reduce(const char* name, const char* op) {
  const std::string_view text = name == nullptr ? "" : name;
  if (text == "sum") return Reduce::kSum;
  if (text == "prod") return Reduce::kProd;
  if (text == "mean") return Reduce::kMean;
  if (text == "amax" || text == "max") return Reduce::kAMax;
  if (text == "amin" || text == "min") return Reduce::kAMin;
  throw_error(ErrorKind::kInvalidArgument, op, ": 'reduce' is \"", text,
              "\", expected \"sum\", \"prod\", \"mean\", \"amax\" or \"amin\"");
}

template <class T>
T reduce_start(Reduce reduce) {
  using Limits = std::numeric_limits<compute_t<T>>;
  switch (reduce) {
    case Reduce::kProd:
      return static_cast<T>(compute_t<T>(1));
    case Reduce::kAMax:
      return static_cast<T>(Limits::has_infinity ? -Limits::infinity() : Limits::lowest());
    case Reduce::kAMin:
      return static_cast<T>(Limits::has_infinity ? Limits::infinity() : Limits::max());
    default:
      return static_cast<T>(compute_t<T>(0));
  }
}

// NaN wins over everything in the extrema.
template <class T>
T combine(Reduce reduce, T a, T b) {
  using Wide = compute_t<T>;
  switch (reduce) {
    case Reduce::kProd:
      if constexpr (std::is_same_v<T, bool>) {
        return a && b;
      } else {
        return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b));
      }
    case Reduce::kAMax:
      return kernels::is_nan(b) || static_cast<Wide>(a) < static_cast<Wide>(b) ? b : a;
    case Reduce::kAMin:
      return kernels::is_nan(b) || static_cast<Wide>(b) < static_cast<Wide>(a) ? b : a;
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

}  // namespace untorch::shims
