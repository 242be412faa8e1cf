// searchsorted, bucketize, histc and histograms (aoti_torch_cpu_*).
#include <algorithm>
#include <cmath>

#include "kernels/cpu/sort/sort.h"
#include "shims/cpu/elementwise.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The first position whose value is ≥ (or, with right, >) `value`. A NaN goes to the end.
template <class T>
std::int64_t bound(const T* sorted, const std::int64_t* order, std::int64_t n, T value, bool right) {
  using Wide = compute_t<T>;
  std::int64_t low = 0, high = n;
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    const Wide there = static_cast<Wide>(sorted[order == nullptr ? middle : order[middle]]),
               wanted = static_cast<Wide>(value);
    const bool stop = right ? there > wanted : there >= wanted;
    if (stop) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void search(const Tensor& sequence, const Tensor& values, DType common, bool int32, bool right, const Tensor* sorter,
            AtenTensorHandle* ret0, const char* op) {
  const bool shared = sequence.dim() == 1;
  check(sequence.dim() > 0, op, ": the sorted sequence must have at least one dimension");
  if (!shared) {
    check(values.dim() == sequence.dim() &&
              std::equal(values.sizes().begin(), values.sizes().end() - 1, sequence.sizes().begin()),
          op, ": the sorted sequence must be 1-D or agree with the values in all but the last dimension, got ",
          to_string(sequence.sizes()), " and ", to_string(values.sizes()));
  }
  const std::int64_t n = sequence.size(-1);
  check(!int32 || n < (std::int64_t{1} << 31), op, ": ", n, " boundaries do not fit int32 positions; use int64");
  TensorPtr order;
  if (sorter != nullptr) {
    check(sorter->dtype() == DType::kInt64 && sorter->sizes() == sequence.sizes(), op, ": 'sorter' is ",
          dtype_name(sorter->dtype()), " ", to_string(sorter->sizes()), ", expected int64 ",
          to_string(sequence.sizes()));
    order = contiguous(*sorter);
    for (std::int64_t i = 0; i < order->numel(); ++i) {
      const std::int64_t at = order->data<std::int64_t>()[i];
      check(at >= 0 && at < n, op, ": 'sorter' holds ", at, ", expected 0 to ", n - 1);
    }
  }
  const TensorPtr sorted = to_dtype(sequence, common), wanted = to_dtype(values, common);
  TensorPtr out = Tensor::empty(values.sizes(), int32 ? DType::kInt32 : DType::kInt64);
  const std::int64_t total = values.numel(),
                     per_row = shared || total == 0 ? std::max<std::int64_t>(total, 1) : values.size(-1);
  dispatch_real(op, common, [&]<class T>() {
    const T* base = sorted->data<T>();
    const T* from = wanted->data<T>();
    const std::int64_t* permutation = order ? order->data<std::int64_t>() : nullptr;
#pragma omp parallel for if (total > 4096)
    for (std::int64_t i = 0; i < total; ++i) {
      const std::int64_t start = i / per_row * n;
      const std::int64_t at =
          bound(base + start, permutation == nullptr ? nullptr : permutation + start, n, from[i], right);
      if (int32) {
        out->data<std::int32_t>()[i] = static_cast<std::int32_t>(at);
      } else {
        out->data<std::int64_t>()[i] = at;
      }
    }
  });
  give(ret0, std::move(out), op);
}

bool from_right(std::int32_t right, const char** side) {
  if (side == nullptr || *side == nullptr) return right != 0;
  const std::string name = *side;
  check(name == "left" || name == "right", "searchsorted: 'side' is \"", name, "\", expected \"left\" or \"right\"");
  check(right == 0 || name == "right", "searchsorted: 'side' is \"left\" but 'right' is true");
  return name == "right";
}

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

// hist over the given axes; writes the edges of each when asked.
void histogram_nd(const Tensor& points, std::int64_t rows, DimSpan counts, const double* range,
                  std::int64_t range_length, const Tensor* weight, bool density, AtenTensorHandle* hist_out,
                  AtenTensorHandle* edges_out, const char* op) {
  const auto ndim = static_cast<std::int64_t>(counts.size());
  for (const std::int64_t count : counts) check(count > 0, op, ": 'bins' is ", count, ", expected 1 or more");
  check(range == nullptr || range_length == 2 * ndim, op, ": 'range' has ", range_length, " values, expected ",
        2 * ndim);
  TensorPtr weights;
  if (weight != nullptr) {
    check(weight->dtype() == points.dtype(), op, ": 'weight' is ", dtype_name(weight->dtype()), ", expected ",
          dtype_name(points.dtype()));
    check(weight->numel() == rows, op, ": 'weight' has ", weight->numel(), " elements, expected ", rows);
    weights = contiguous(*weight);
  }
  const TensorPtr dense = contiguous(points);
  TensorPtr hist = Tensor::zeros(counts, points.dtype()), edges;
  dispatch_histogram(op, points.dtype(), [&]<class T>() {
    const T* data = dense->data<T>();
    std::vector<Bins<T>> bins;
    for (std::int64_t d = 0; d < ndim; ++d) {
      T low = 0, high = rows == 0 ? T(1) : T(0);
      if (range != nullptr) {
        low = static_cast<T>(range[2 * d]);
        high = static_cast<T>(range[2 * d + 1]);
        check(low <= high, op, ": range [", low, ", ", high, "] is empty");
      } else {
        for (std::int64_t r = 0; r < rows; ++r) {
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
      bins.emplace_back(counts[static_cast<std::size_t>(d)], low, high);
    }
    T* to = hist->data<T>();
    accumulate(to, bins, data, weights ? weights->data<T>() : nullptr, rows);
    if (density) {
      T sum = 0;
      const std::int64_t cells = hist->numel();
      for (std::int64_t i = 0; i < cells; ++i) sum += to[i];
      for (std::int64_t i = 0; i < cells; ++i) {
        std::int64_t rest = i;
        to[i] /= sum;
        for (std::size_t d = counts.size(); d-- > 0;) {
          const auto at = static_cast<std::size_t>(rest % counts[d]);
          to[i] /= bins[d].edges[at + 1] - bins[d].edges[at];
          rest /= counts[d];
        }
      }
    }
    if (edges_out != nullptr) {
      const std::int64_t n = counts[0] + 1;
      edges = Tensor::empty(DimSpan(&n, 1), points.dtype());
      std::copy(bins[0].edges.begin(), bins[0].edges.end(), edges->data<T>());
    }
  });
  give(hist_out, std::move(hist), op);
  if (edges_out != nullptr) give(edges_out, std::move(edges), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_searchsorted_Tensor(AtenTensorHandle sorted_sequence, AtenTensorHandle self,
                                                std::int32_t out_int32, std::int32_t right, const char** side,
                                                AtenTensorHandle* sorter, AtenTensorHandle* ret0) {
  return guarded("searchsorted", [&] {
    const Tensor& sequence = cpu_input(sorted_sequence, "searchsorted", "sorted_sequence");
    const Tensor& values = cpu_input(self, "searchsorted", "self");
    search(sequence, values, promote_types(sequence.dtype(), values.dtype()), out_int32 != 0, from_right(right, side),
           optional_cpu_input(sorter, "searchsorted", "sorter"), ret0, "searchsorted");
  });
}

UNTORCH_SHIM aoti_torch_cpu_searchsorted_Scalar(AtenTensorHandle sorted_sequence, double self, std::int32_t out_int32,
                                                std::int32_t right, const char** side, AtenTensorHandle* sorter,
                                                AtenTensorHandle* ret0) {
  return guarded("searchsorted", [&] {
    const Tensor& sequence = cpu_input(sorted_sequence, "searchsorted", "sorted_sequence");
    check(sequence.dim() == 1, "searchsorted: a scalar needs a 1-D sorted sequence, got ", sequence.dim(), "-D");
    const DType common = result_type_with_double(sequence);
    search(sequence, *scalar_tensor(self, common), common, out_int32 != 0, from_right(right, side),
           optional_cpu_input(sorter, "searchsorted", "sorter"), ret0, "searchsorted");
  });
}

UNTORCH_SHIM aoti_torch_cpu_bucketize_Tensor(AtenTensorHandle self, AtenTensorHandle boundaries, std::int32_t out_int32,
                                             std::int32_t right, AtenTensorHandle* ret0) {
  return guarded("bucketize", [&] {
    const Tensor& values = cpu_input(self, "bucketize", "self");
    const Tensor& edges = cpu_input(boundaries, "bucketize", "boundaries");
    check(edges.dim() == 1, "bucketize: 'boundaries' must be 1-D, got ", edges.dim(), "-D");
    search(edges, values, promote_types(edges.dtype(), values.dtype()), out_int32 != 0, right != 0, nullptr, ret0,
           "bucketize");
  });
}

UNTORCH_SHIM aoti_torch_cpu_histc(AtenTensorHandle self, std::int64_t bins, double min, double max,
                                  AtenTensorHandle* ret0) {
  return guarded("histc", [&] {
    const Tensor& t = cpu_input(self, "histc", "self");
    check(bins > 0, "histc: 'bins' is ", bins, ", expected 1 or more");
    const TensorPtr dense = contiguous(t);
    TensorPtr out = Tensor::zeros(DimSpan(&bins, 1), t.dtype());
    dispatch_histogram("histc", t.dtype(), [&]<class T>() {
      const T* data = dense->data<T>();
      const std::int64_t n = dense->numel();
      T low = static_cast<T>(min), high = static_cast<T>(max);
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
      check(low < high, "histc: 'max' is ", high, ", expected more than 'min' ", low);
      const Bins<T> axis(bins, low, high);
      for (std::int64_t i = 0; i < n; ++i) {
        if (axis.holds(data[i])) out->data<T>()[axis.nearby(data[i])] += 1;
      }
    });
    give(ret0, std::move(out), "histc");
  });
}

UNTORCH_SHIM aoti_torch_cpu_histogram_bin_ct(AtenTensorHandle self, std::int64_t bins, const double** range,
                                             std::int64_t range_len_, AtenTensorHandle* weight, std::int32_t density,
                                             AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("histogram", [&] {
    const Tensor& t = cpu_input(self, "histogram", "self");
    histogram_nd(t, t.numel(), DimSpan(&bins, 1), range == nullptr ? nullptr : *range, range_len_,
                 optional_cpu_input(weight, "histogram", "weight"), density != 0, ret0, ret1, "histogram");
  });
}

UNTORCH_SHIM aoti_torch_cpu__histogramdd_from_bin_cts(AtenTensorHandle self, const std::int64_t* bins,
                                                      std::int64_t bins_len_, const double** range,
                                                      std::int64_t range_len_, AtenTensorHandle* weight,
                                                      std::int32_t density, AtenTensorHandle* ret0) {
  return guarded("histogramdd", [&] {
    const Tensor& t = cpu_input(self, "histogramdd", "self");
    check(t.dim() >= 2, "histogramdd: 'self' must have at least 2 dimensions, got ", t.dim());
    check(bins_len_ == t.size(-1), "histogramdd: 'bins' has ", bins_len_, " entries, expected ", t.size(-1),
          " (the size of the last dimension)");
    histogram_nd(t, t.size(-1) == 0 ? 0 : t.numel() / t.size(-1), ints(bins, bins_len_),
                 range == nullptr ? nullptr : *range, range_len_, optional_cpu_input(weight, "histogramdd", "weight"),
                 density != 0, ret0, nullptr, "histogramdd");
  });
}
