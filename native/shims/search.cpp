// searchsorted, bucketize, histc and histograms.
#include "kernels/search.h"

#include <algorithm>
#include <cmath>

#include "shims/device_work.h"
#include "shims/promotion.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_search(const Op& op, const Tensor& sequence, DimSpan value_sizes, DType common, bool int32,
                  const Tensor* sorter) {
  check(sequence.dim() > 0, op, ": the sorted sequence must have at least one dimension");
  if (sequence.dim() != 1) {
    check(static_cast<std::int64_t>(value_sizes.size()) == sequence.dim() &&
              std::equal(value_sizes.begin(), value_sizes.end() - 1, sequence.sizes().begin()),
          op, ": the sorted sequence must be 1-D or agree with the values in all but the last dimension, got ",
          to_string(sequence.sizes()), " and ", to_string(value_sizes));
  }
  const std::int64_t n = sequence.size(-1);
  check(!int32 || n < (std::int64_t{1} << 31), op, ": ", n, " boundaries do not fit int32 positions; use int64");
  if (sorter != nullptr) {
    check(sorter->dtype() == DType::kInt64 && sorter->sizes() == sequence.sizes(), op, ": 'sorter' is ",
          dtype_name(sorter->dtype()), " ", to_string(sorter->sizes()), ", expected int64 ",
          to_string(sequence.sizes()));
  }
  if (common != DType::kBool && !is_integral(common) && !is_floating(common)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(common), " is not supported");
  }
}

// `values`: on the operator's device, or one scalar on the CPU.
void search(const Op& op, const Tensor& sequence, const Tensor& values, DType common, bool int32, bool right,
            const Tensor* sorter, AtenTensorHandle* ret0) {
  check_search(op, sequence, values.sizes(), common, int32, sorter);
  const bool scalar = op.on_cuda() && values.device().type == DeviceType::kCPU;
  TensorPtr out, sorted, wanted, order;
  kernels::SearchParams params;
  const auto prepare = [&] {
    out = Tensor::empty(values.sizes(), int32 ? DType::kInt32 : DType::kInt64, sequence.device());
    sorted = to_dtype(sequence, common);
    if (!scalar) wanted = to_dtype(values, common);
    if (sorter != nullptr) order = contiguous(*sorter);
    params.sorted = sorted->raw();
    params.n = sequence.size(-1);
    params.total = out->numel();
    params.per_row = sequence.dim() == 1 ? params.total : values.size(-1);
    params.dtype = common;
    params.sorter = order ? order->data<std::int64_t>() : nullptr;
    params.right = right;
    params.out = out->raw();
    params.out_int32 = int32;
  };
  run(
      op, {&sequence, scalar ? nullptr : &values, sorter},
      [&] {
        prepare();
        if (order) {
          const auto count = static_cast<std::size_t>(order->numel());
          const auto wrong = kernels::cpu::outside({params.sorter, count}, params.n);
          check(!wrong, op, ": 'sorter' holds ", wrong.value_or(0), ", expected 0 to ", params.n - 1);
        }
        params.values = wanted->raw();
        kernels::cpu::search(params);
      },
      [&](const auto& on) {
        prepare();
        if (scalar) {
          wanted = Tensor::empty(DimSpan{}, common, on.device());
          fill_on_device(on, *wanted, values);
        }
        params.values = wanted->raw();
        return kernels::cuda::search(params, on.stream());
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

void check_histogram_dtype(const char* op, DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kFloat64) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
              " is not supported, expected float32 or float64");
}

// Counts over the given axes; writes the edges of the first when asked.
void point_histogram(const char* op, const Tensor& points, std::int64_t rows, DimSpan counts, const double* range,
                     std::int64_t range_length, const Tensor* weight, bool density, AtenTensorHandle* hist_out,
                     AtenTensorHandle* edges_out) {
  const auto ndim = static_cast<std::int64_t>(counts.size());
  for (const std::int64_t count : counts) check(count > 0, op, ": 'bins' is ", count, ", expected 1 or more");
  check(range == nullptr || range_length == 2 * ndim, op, ": 'range' has ", range_length, " values, expected ",
        2 * ndim);
  if (weight != nullptr) {
    check(weight->dtype() == points.dtype(), op, ": 'weight' is ", dtype_name(weight->dtype()), ", expected ",
          dtype_name(points.dtype()));
    check(weight->numel() == rows, op, ": 'weight' has ", weight->numel(), " elements, expected ", rows);
  }
  check_histogram_dtype(op, points.dtype());
  const TensorPtr weights = weight == nullptr ? nullptr : contiguous(*weight), dense = contiguous(points);
  TensorPtr hist = Tensor::zeros(counts, points.dtype()), edges;
  if (edges_out != nullptr) edges = Tensor::empty(Dims{counts[0] + 1}, points.dtype());
  kernels::PointHistogramParams params;
  params.points = dense->raw();
  params.rows = rows;
  params.bins = counts;
  params.range = range;
  params.weights = weights ? weights->raw() : nullptr;
  params.density = density;
  params.dtype = points.dtype();
  params.out = hist->raw();
  params.edges = edges ? edges->raw() : nullptr;
  kernels::cpu::point_histogram(op, params);
  give(hist_out, std::move(hist), op);
  if (edges_out != nullptr) give(edges_out, std::move(edges), op);
}

}  // namespace

UNTORCH_OP_AS("searchsorted", searchsorted_Tensor,
              (AtenTensorHandle sorted_sequence, AtenTensorHandle self, std::int32_t out_int32, std::int32_t right,
               const char** side, AtenTensorHandle* sorter, AtenTensorHandle* ret0),
              sorted_sequence, self, out_int32, right, side, sorter, ret0) {
  const Tensor &sequence = op.input(sorted_sequence, "sorted_sequence"), &values = op.input(self, "self");
  const Tensor* order = op.optional_input(sorter, "sorter");
  search(op, sequence, values, promote_types(sequence.dtype(), values.dtype()), out_int32 != 0, from_right(right, side),
         order, ret0);
}

UNTORCH_OP_AS("searchsorted", searchsorted_Scalar,
              (AtenTensorHandle sorted_sequence, double self, std::int32_t out_int32, std::int32_t right,
               const char** side, AtenTensorHandle* sorter, AtenTensorHandle* ret0),
              sorted_sequence, self, out_int32, right, side, sorter, ret0) {
  const Tensor& sequence = op.input(sorted_sequence, "sorted_sequence");
  check(sequence.dim() == 1, "searchsorted: a scalar needs a 1-D sorted sequence, got ", sequence.dim(), "-D");
  const Tensor* order = op.optional_input(sorter, "sorter");
  const DType common = result_type_with_double(sequence);
  search(op, sequence, *scalar_tensor(self, common), common, out_int32 != 0, from_right(right, side), order, ret0);
}

UNTORCH_OP_AS("bucketize", bucketize_Tensor,
              (AtenTensorHandle self, AtenTensorHandle boundaries, std::int32_t out_int32, std::int32_t right,
               AtenTensorHandle* ret0),
              self, boundaries, out_int32, right, ret0) {
  const Tensor &values = op.input(self, "self"), &edges = op.input(boundaries, "boundaries");
  check(edges.dim() == 1, "bucketize: 'boundaries' must be 1-D, got ", edges.dim(), "-D");
  search(op, edges, values, promote_types(edges.dtype(), values.dtype()), out_int32 != 0, right != 0, nullptr, ret0);
}

// CUDA counts integers too, as PyTorch's does. Where the range is that of the data it stays on the device, so a range
// that is not finite is not an error there: the counts are NaN.
UNTORCH_OP(histc, (AtenTensorHandle self, std::int64_t bins, double min, double max, AtenTensorHandle* ret0), self,
           bins, min, max, ret0) {
  const Tensor& t = op.input(self, "self");
  check(bins > 0, "histc: 'bins' is ", bins, ", expected 1 or more");
  if (!op.on_cuda()) check_histogram_dtype(op, t.dtype());
  check(std::isfinite(min) && std::isfinite(max), "histc: range [", min, ", ", max, "] is not finite");
  check(min <= max, "histc: 'max' is ", max, ", expected more than 'min' ", min);
  if (!is_integral(t.dtype()) && !is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, "histc: dtype ", dtype_name(t.dtype()), " is not supported");
  }
  const TensorPtr dense = contiguous(t);
  TensorPtr out;
  kernels::HistogramParams params{dense->raw(), t.numel(), t.dtype(), bins, min, max, nullptr};
  run(
      op, {&t},
      [&] {
        out = Tensor::zeros(DimSpan(&bins, 1), t.dtype());
        params.out = out->raw();
        kernels::cpu::histogram(params);
      },
      [&](const auto& on) {
        out = Tensor::empty(DimSpan(&bins, 1), t.dtype(), on.device());
        params.out = out->raw();
        with_scratch(on, kernels::cuda::histogram_scratch(bins),
                     [&](void* scratch) { return kernels::cuda::histogram(params, scratch, on.stream()); });
      });
  give(ret0, std::move(out), op);
}

UNTORCH_SHIM aoti_torch_cpu_histogram_bin_ct(AtenTensorHandle self, std::int64_t bins, const double** range,
                                             std::int64_t range_len_, AtenTensorHandle* weight, std::int32_t density,
                                             AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("histogram", [&] {
    const Tensor& t = cpu_input(self, "histogram", "self");
    point_histogram("histogram", t, t.numel(), DimSpan(&bins, 1), range == nullptr ? nullptr : *range, range_len_,
                    optional_cpu_input(weight, "histogram", "weight"), density != 0, ret0, ret1);
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
    point_histogram("histogramdd", t, t.size(-1) == 0 ? 0 : t.numel() / t.size(-1), ints(bins, bins_len_),
                    range == nullptr ? nullptr : *range, range_len_,
                    optional_cpu_input(weight, "histogramdd", "weight"), density != 0, ret0, nullptr);
  });
}
