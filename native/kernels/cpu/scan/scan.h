// Running sums, products, extrema and log-sum-exps along one lane of n values with strides.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "base/dispatch.h"
#include "kernels/cpu/sort/sort.h"

namespace untorch::kernels {

// Sums of float run in double, as PyTorch's do on the CPU; half types accumulate in float, integers in themselves.
template <class T>
struct ScanType {
  using type = compute_t<T>;
};
template <>
struct ScanType<float> {
  using type = double;
};

template <class T>
void cumsum_lane(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  typename ScanType<T>::type sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    sum += in[i * in_step];
    out[i * out_step] = static_cast<T>(sum);
  }
}

template <class T>
void cumprod_lane(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  typename ScanType<T>::type product = 1;
  for (std::int64_t i = 0; i < n; ++i) {
    product *= in[i * in_step];
    out[i * out_step] = static_cast<T>(product);
  }
}

// Ties take the later position; once a NaN was met it stays, at the position of the last NaN.
template <bool kMax, class T>
void cumulative_extremum_lane(T* out, std::int64_t out_step, std::int64_t* index, std::int64_t index_step, const T* in,
                              std::int64_t in_step, std::int64_t n) {
  if (n == 0) return;
  T best = in[0];
  std::int64_t at = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const T value = in[i * in_step];
    const bool better = kMax ? static_cast<compute_t<T>>(value) >= static_cast<compute_t<T>>(best)
                             : static_cast<compute_t<T>>(value) <= static_cast<compute_t<T>>(best);
    if (is_nan(value) || (!is_nan(best) && better)) {
      best = value;
      at = i;
    }
    out[i * out_step] = best;
    index[i * index_step] = at;
  }
}

// log(exp(a) + exp(b)) without overflow; infinities of one sign and NaNs pass through.
template <class T>
T log_add_exp(T a, T b) {
  const T high = std::isnan(a) ? a : (std::isnan(b) ? b : (a > b ? a : b));
  const T low = std::isnan(a) ? a : (std::isnan(b) ? b : (a > b ? b : a));
  if (low == high && std::isinf(low)) return low;
  return std::log1p(std::exp(low - high)) + high;
}

template <class T>
void logcumsumexp_lane(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  using Wide = typename ScanType<T>::type;
  Wide running = -std::numeric_limits<Wide>::infinity();
  for (std::int64_t i = 0; i < n; ++i) {
    running = log_add_exp<Wide>(static_cast<Wide>(in[i * in_step]), running);
    out[i * out_step] = static_cast<T>(running);
  }
}

}  // namespace untorch::kernels
