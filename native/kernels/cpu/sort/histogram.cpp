// Histograms over equal bins: the values read once, twice when the range is theirs; one thread, in order.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "base/error.h"
#include "kernels/search.h"

namespace untorch::kernels::cpu {
namespace {

// Equal bins over [low, high], the last edge included.
template <class T>
struct Bins {
  std::int64_t count;
  T low, high;
  std::vector<T> edges;

  Bins(std::int64_t n, T first, T last) : count(n), low(first), high(last), edges(static_cast<std::size_t>(n) + 1) {
    const T step = (high - low) / static_cast<T>(n);
    for (std::int64_t i = 0; i <= n; ++i) {
      edges[static_cast<std::size_t>(i)] =
          i < (n + 1) / 2 ? low + step * static_cast<T>(i) : high - step * static_cast<T>(n - i);
    }
  }
  bool holds(T value) const { return value >= low && value <= high; }
  std::int64_t nearby(T value) const {
    return std::min(static_cast<std::int64_t>((value - low) * static_cast<T>(count) / (high - low)), count - 1);
  }
  // `nearby`, corrected by the edges themselves, which rounding may have put on the other side.
  std::int64_t exact(T value) const {
    const std::int64_t guess = nearby(value);
    const auto begin = edges.begin() + std::max<std::int64_t>(guess - 1, 0);
    const auto end = edges.begin() + std::min<std::int64_t>(guess + 2, count + 1);
    const std::int64_t at = std::upper_bound(begin, end, value) - edges.begin() - 1;
    return std::clamp<std::int64_t>(at, 0, count - 1);
  }
};

template <class Fn>
void dispatch_histogram(const char* op, DType dtype, Fn&& fn) {
  if (dtype == DType::kFloat32) return fn.template operator()<float>();
  if (dtype == DType::kFloat64) return fn.template operator()<double>();
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
              " is not supported, expected float32 or float64");
}

// Histogram of `rows` points of bins.size() coordinates; hist is row-major.
template <class T>
void accumulate(T* hist, const std::vector<Bins<T>>& bins, const T* points, const T* weights, std::int64_t rows) {
  const auto ndim = static_cast<std::int64_t>(bins.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t cell = 0;
    bool inside = true;
    for (std::int64_t d = 0; inside && d < ndim; ++d) {
      const Bins<T>& axis = bins[static_cast<std::size_t>(d)];
      const T value = points[r * ndim + d];
      inside = axis.holds(value);
      if (inside) cell = cell * axis.count + axis.exact(value);
    }
    if (inside) hist[cell] += weights == nullptr ? T(1) : weights[r];
  }
}

}  // namespace

void histogram(const HistogramParams& params) {
  dispatch_histogram("histc", params.dtype, [&]<class T>() {
    const T* data = static_cast<const T*>(params.values);
    T* out = static_cast<T*>(params.out);
    const std::int64_t n = params.n;
    T low = static_cast<T>(params.min), high = static_cast<T>(params.max);
    if (low == high && n > 0) {
      low = high = data[0];
      for (std::int64_t i = 0; i < n; ++i) {
        if (std::isnan(data[i])) {
          low = high = data[i];
          break;
        }
        low = std::min(low, data[i]);
        high = std::max(high, data[i]);
      }
    }
    if (low == high) {
      low -= 1;
      high += 1;
    }
    check(std::isfinite(low) && std::isfinite(high), "histc: range [", low, ", ", high, "] is not finite");
    const Bins<T> axis(params.bins, low, high);
    for (std::int64_t i = 0; i < n; ++i) {
      if (axis.holds(data[i])) out[axis.nearby(data[i])] += 1;
    }
  });
}

void point_histogram(const char* op, const PointHistogramParams& params) {
  const auto ndim = static_cast<std::int64_t>(params.bins.size());
  dispatch_histogram(op, params.dtype, [&]<class T>() {
    const T* data = static_cast<const T*>(params.points);
    std::vector<Bins<T>> bins;
    for (std::int64_t d = 0; d < ndim; ++d) {
      T low = 0, high = params.rows == 0 ? T(1) : T(0);
      if (params.range != nullptr) {
        low = static_cast<T>(params.range[2 * d]);
        high = static_cast<T>(params.range[2 * d + 1]);
        check(low <= high, op, ": range [", low, ", ", high, "] is empty");
      } else {
        for (std::int64_t r = 0; r < params.rows; ++r) {
          const T value = data[r * ndim + d];
          if (r == 0 || value < low || std::isnan(value)) low = value;
          if (r == 0 || value > high || std::isnan(value)) high = value;
          if (std::isnan(value)) break;
        }
      }
      check(std::isfinite(low) && std::isfinite(high), op, ": range [", low, ", ", high, "] is not finite");
      if (low == high) {
        low -= T(0.5);
        high += T(0.5);
      }
      bins.emplace_back(params.bins[static_cast<std::size_t>(d)], low, high);
    }
    T* to = static_cast<T*>(params.out);
    accumulate(to, bins, data, static_cast<const T*>(params.weights), params.rows);
    if (params.density) {
      std::int64_t cells = 1;
      for (const std::int64_t count : params.bins) cells *= count;
      T sum = 0;
      for (std::int64_t i = 0; i < cells; ++i) sum += to[i];
      for (std::int64_t i = 0; i < cells; ++i) {
        std::int64_t rest = i;
        to[i] /= sum;
        for (std::size_t d = params.bins.size(); d-- > 0;) {
          const auto at = static_cast<std::size_t>(rest % params.bins[d]);
          to[i] /= bins[d].edges[at + 1] - bins[d].edges[at];
          rest /= params.bins[d];
        }
      }
    }
    if (params.edges != nullptr) {
      std::copy(bins[0].edges.begin(), bins[0].edges.end(), static_cast<T*>(params.edges));
    }
  });
}

}  // namespace untorch::kernels::cpu
