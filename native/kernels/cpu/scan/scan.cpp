// Cumulative sums, products, log-sum-exps and extrema: a row a task, one running value in a register. Bytes: the input
// read once and the result written once.
#include "kernels/scan.h"

#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>

#include "kernels/cpu/common/map.h"
#include "kernels/cpu/common/order.h"

namespace untorch::kernels::cpu {
namespace {

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
void cumsum_row(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  typename ScanType<T>::type sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    sum += in[i * in_step];
    out[i * out_step] = static_cast<T>(sum);
  }
}

template <class T>
void cumprod_row(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  typename ScanType<T>::type product = 1;
  for (std::int64_t i = 0; i < n; ++i) {
    product *= in[i * in_step];
    out[i * out_step] = static_cast<T>(product);
  }
}

// Complex sums and products run in double.
template <bool kProduct, class T>
void complex_row(std::complex<T>* out, std::int64_t out_step, const std::complex<T>* in, std::int64_t in_step,
                 std::int64_t n) {
  std::complex<double> running = kProduct ? 1.0 : 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::complex<double> value(in[i * in_step]);
    running = kProduct ? running * value : running + value;
    out[i * out_step] = std::complex<T>(running);
  }
}

// Ties take the later position; once a NaN was met it stays, at the position of the last NaN.
template <bool kMax, class T>
void cumulative_extremum_row(T* out, std::int64_t out_step, std::int64_t* index, std::int64_t index_step, const T* in,
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
void logcumsumexp_row(T* out, std::int64_t out_step, const T* in, std::int64_t in_step, std::int64_t n) {
  using Wide = typename ScanType<T>::type;
  Wide running = -std::numeric_limits<Wide>::infinity();
  for (std::int64_t i = 0; i < n; ++i) {
    running = log_add_exp<Wide>(static_cast<Wide>(in[i * in_step]), running);
    out[i * out_step] = static_cast<T>(running);
  }
}

template <bool kProduct>
void cumulative(const char* op, const ScanParams& params) {
  dispatch_number(op, params.out_dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) {
      T* out = static_cast<T*>(params.out);
      const T* in = static_cast<const T*>(params.input);
      for_each_lane(params.lanes, params.lanes.n, [&](const std::array<std::int64_t, 2>& at) {
        const std::int64_t out_step = params.lanes.step[0], in_step = params.lanes.step[1], n = params.lanes.n;
        if constexpr (kIsComplex<T>) {
          complex_row<kProduct>(out + at[0], out_step, in + at[1], in_step, n);
        } else if constexpr (kProduct) {
          cumprod_row(out + at[0], out_step, in + at[1], in_step, n);
        } else {
          cumsum_row(out + at[0], out_step, in + at[1], in_step, n);
        }
      });
    }
  });
}

template <bool kMax>
void extremum(const ExtremumParams& params) {
  const Lanes<3>& lanes = params.lanes;
  dispatch_real("cumulative_extremum", params.dtype, [&]<class T>() {
    T* values = static_cast<T*>(params.values);
    const T* in = static_cast<const T*>(params.input);
    for_each_lane(lanes, lanes.n, [&](const std::array<std::int64_t, 3>& at) {
      cumulative_extremum_row<kMax>(values + at[0], lanes.step[0], params.indices + at[1], lanes.step[1], in + at[2],
                                    lanes.step[2], lanes.n);
    });
  });
}

}  // namespace

void cumsum(const ScanParams& params) { cumulative<false>("cumsum", params); }
void cumprod(const ScanParams& params) { cumulative<true>("cumprod", params); }

void logcumsumexp(const ScanParams& params) {
  const Lanes<2>& lanes = params.lanes;
  dispatch_floating("logcumsumexp", params.out_dtype, [&]<class T>() {
    T* out = static_cast<T*>(params.out);
    const T* in = static_cast<const T*>(params.input);
    for_each_lane(lanes, lanes.n * 16, [&](const std::array<std::int64_t, 2>& at) {
      logcumsumexp_row(out + at[0], lanes.step[0], in + at[1], lanes.step[1], lanes.n);
    });
  });
}

void cumulative_extremum(const ExtremumParams& params) {
  params.largest ? extremum<true>(params) : extremum<false>(params);
}

}  // namespace untorch::kernels::cpu
