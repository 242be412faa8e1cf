// sort, topk, kthvalue, median, nanmedian and mode.
#include "kernels/sort.h"

#include <limits>

#include "shims/broadcast.h"
#include "shims/device_work.h"
#include "shims/layout.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Select;
using kernels::SelectParams;
using kernels::SortParams;

namespace {

const Tensor& ordered_input(const Op& op, AtenTensorHandle self) {
  const Tensor& t = op.input(self, "self");
  check_ordered(op, t);
  return t;
}

// The GPU's kernels hold positions in 32 bits while they sort.
void check_length(const Op& op, std::int64_t n) {
  if (op.on_cuda() && n > kernels::cuda::kSortMax) {
    throw_error(ErrorKind::kUnsupported, op, ": ", n, " elements in a row, expected at most ", kernels::cuda::kSortMax);
  }
}

SortParams sort_params(const Op& op, std::int64_t dim, const Tensor& values, const Tensor& indices, const Tensor& t) {
  SortParams params;
  params.lanes = lanes<3>(op, dim, {&values, &indices, &t});
  params.values = values.raw();
  params.indices = indices.data<std::int64_t>();
  params.input = t.raw();
  params.dtype = t.dtype();
  params.take = params.lanes.n;
  return params;
}

[[maybe_unused]] void sort_on(const OnDevice& on, const SortParams& params) {
  std::size_t bytes = 0;
  on.launched(kernels::cuda::sort_scratch(params, bytes));
  with_scratch(on, bytes, [&](void* scratch) { return kernels::cuda::sort(params, scratch, on.stream()); });
}

[[maybe_unused]] void select_on(const OnDevice& on, const SelectParams& params) {
  std::size_t bytes = 0;
  on.launched(kernels::cuda::select_scratch(params, bytes));
  with_scratch(on, bytes, [&](void* scratch) { return kernels::cuda::select(params, scratch, on.stream()); });
}

void sort_rows(const Op& op, AtenTensorHandle self, std::int64_t dim_arg, bool descending, AtenTensorHandle* ret0,
               AtenTensorHandle* ret1) {
  const Tensor& t = ordered_input(op, self);
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  check_length(op, lane_size(t, dim));
  TensorPtr values = empty_like(t, t.dtype()), indices = empty_like(t, DType::kInt64);
  if (t.numel() != 0) {
    SortParams params = sort_params(op, dim, *values, *indices, t);
    params.descending = descending;
    run(op, {&t}, [&] { kernels::cpu::sort(params); }, [&](const auto& on) { sort_on(on, params); });
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

// Operators that keep one element a row. fill(values, indices) writes them; both have self's rank.
template <class Fill>
void keep_one(const Op& op, const Tensor& t, std::int64_t dim, bool keepdim, AtenTensorHandle* ret0,
              AtenTensorHandle* ret1, Fill&& fill) {
  const auto kept = reduced_shape(t.sizes(), dim, true);
  TensorPtr values = Tensor::empty(kept, t.dtype(), t.device()),
            indices = Tensor::empty(kept, DType::kInt64, t.device());
  if (t.numel() != 0) fill(*values, *indices);
  if (!keepdim) {
    const auto shape = reduced_shape(t.sizes(), dim, false);
    values = values->view(shape, contiguous_strides(shape), 0);
    indices = indices->view(shape, contiguous_strides(shape), 0);
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

// The sorted rows lie one after the other, in the order of the results' elements; a second kernel takes their modes.
[[maybe_unused]] void mode_on(const OnDevice& on, const Op& op, const Tensor& t, std::int64_t dim, const Tensor& values,
                              const Tensor& indices) {
  const std::int64_t n = lane_size(t, dim), rows = t.numel() / n, one = 1;
  const TensorPtr sorted = Tensor::empty(Dims{rows, n}, t.dtype(), t.device()),
                  order = Tensor::empty(Dims{rows, n}, DType::kInt64, t.device());
  Dims strides;
  strides.resize(t.sizes().size());
  std::int64_t step = n;
  for (std::size_t d = strides.size(); d-- > 0;) {
    const bool along = static_cast<std::int64_t>(d) == dim;
    strides[d] = along ? 1 : step;
    if (!along) step *= t.sizes()[d];
  }
  const TensorPtr sorted_view = sorted->view(t.sizes(), strides, 0), order_view = order->view(t.sizes(), strides, 0);
  sort_on(on, sort_params(op, dim, *sorted_view, *order_view, t));
  const TensorPtr flat_values = values.view({&rows, 1}, {&one, 1}, 0),
                  flat_indices = indices.view({&rows, 1}, {&one, 1}, 0);
  on.launched(kernels::cuda::mode(strided<2>(op, flat_values->sizes(), {flat_values.get(), flat_indices.get()}),
                                  values.raw(), indices.data<std::int64_t>(), sorted->raw(),
                                  order->data<std::int64_t>(), n, t.dtype(), on.stream()));
}

// The median of nothing is NaN for floating types; integers give the smallest value, as in PyTorch.
TensorPtr median_of_nothing(const Op& op, DType dtype) {
  TensorPtr out = Tensor::empty(DimSpan{}, dtype);
  dispatch_real(op, dtype, [&]<class T>() {
    if constexpr (std::is_integral_v<T>) {
      *out->data<T>() = std::numeric_limits<T>::lowest();
    } else {
      *out->data<T>() = static_cast<T>(std::numeric_limits<compute_t<T>>::quiet_NaN());
    }
  });
  return out;
}

void median_of_all(const Op& op, AtenTensorHandle self, Select what, AtenTensorHandle* ret0) {
  const Tensor& t = ordered_input(op, self);
  check_length(op, t.numel());
  TensorPtr out;
  if (t.numel() == 0) {
    TensorPtr host = median_of_nothing(op, t.dtype());
    run(
        op, {&t}, [&] { out = std::move(host); },
        [&](const auto& on) {
          out = Tensor::empty(DimSpan{}, t.dtype(), on.device());
          fill_on_device(on, *out, *host);
        });
    return give(ret0, std::move(out), op);
  }
  out = Tensor::empty(DimSpan{}, t.dtype(), t.device());
  const TensorPtr dense = contiguous(t);
  const std::int64_t n = t.numel(), one = 1;
  const TensorPtr flat = dense->view({&n, 1}, {&one, 1}, dense->storage_offset()),
                  kept = out->view({&one, 1}, {&one, 1}, 0);
  SelectParams params;
  params.what = what;
  params.sort.lanes = lanes<3>(op, 0, {kept.get(), kept.get(), flat.get()});
  params.sort.values = out->raw();
  params.sort.input = flat->raw();
  params.sort.dtype = t.dtype();
  run(op, {&t}, [&] { kernels::cpu::select(params); }, [&](const auto& on) { select_on(on, params); });
  give(ret0, std::move(out), op);
}

}  // namespace

UNTORCH_OP(sort,
           (AtenTensorHandle self, std::int64_t dim, std::int32_t descending, AtenTensorHandle* ret0,
            AtenTensorHandle* ret1),
           self, dim, descending, ret0, ret1) {
  sort_rows(op, self, dim, descending != 0, ret0, ret1);
}

// The sort is always stable, so the flag does not matter.
UNTORCH_OP_AS("sort", sort_stable,
              (AtenTensorHandle self, std::int32_t* stable, std::int64_t dim, std::int32_t descending,
               AtenTensorHandle* ret0, AtenTensorHandle* ret1),
              self, stable, dim, descending, ret0, ret1) {
  static_cast<void>(stable);
  sort_rows(op, self, dim, descending != 0, ret0, ret1);
}

// The result is sorted in any case: sorted=False only permits another order. Equal elements: lowest index first.
UNTORCH_OP(topk,
           (AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t largest, std::int32_t sorted,
            AtenTensorHandle* ret0, AtenTensorHandle* ret1),
           self, k, dim_arg, largest, sorted, ret0, ret1) {
  static_cast<void>(sorted);
  const Tensor& t = ordered_input(op, self);
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op), n = lane_size(t, dim);
  check(k >= 0 && k <= n, "topk: k is ", k, ", expected 0 to ", n, " (the size of dimension ", dim, ")");
  check_length(op, n);
  std::vector<std::int64_t> shape(t.sizes().begin(), t.sizes().end());
  if (!shape.empty()) shape[static_cast<std::size_t>(dim)] = k;
  TensorPtr values = Tensor::empty(shape, t.dtype(), t.device()),
            indices = Tensor::empty(shape, DType::kInt64, t.device());
  if (k > 0 && t.numel() != 0) {
    SelectParams params{sort_params(op, dim, *values, *indices, t), Select::kFirst, k};
    params.sort.descending = largest != 0;
    params.sort.take = k;
    run(
        op, {&t}, [&] { kernels::cpu::select(params); },
        [&](const auto& on) {
          const bool sorts = n <= kernels::cuda::kCtaSortMax || k > kernels::cuda::kSelectMax;
          sorts ? sort_on(on, params.sort) : select_on(on, params);
        });
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

UNTORCH_OP(kthvalue,
           (AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t keepdim, AtenTensorHandle* ret0,
            AtenTensorHandle* ret1),
           self, k, dim_arg, keepdim, ret0, ret1) {
  const Tensor& t = ordered_input(op, self);
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op), n = lane_size(t, dim);
  check(k >= 1 && k <= n, "kthvalue: k is ", k, ", expected 1 to ", n, " (the size of dimension ", dim, ")");
  check_length(op, n);
  keep_one(op, t, dim, keepdim != 0, ret0, ret1, [&](const Tensor& values, const Tensor& indices) {
    SelectParams params{sort_params(op, dim, values, indices, t), Select::kRank, k - 1};
    params.sort.first = k - 1;
    params.sort.take = 1;
    run(
        op, {&t}, [&] { kernels::cpu::select(params); },
        [&](const auto& on) { n <= kernels::cuda::kCtaSortMax ? sort_on(on, params.sort) : select_on(on, params); });
  });
}

UNTORCH_OP(mode,
           (AtenTensorHandle self, std::int64_t dim_arg, std::int32_t keepdim, AtenTensorHandle* ret0,
            AtenTensorHandle* ret1),
           self, dim_arg, keepdim, ret0, ret1) {
  const Tensor& t = ordered_input(op, self);
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op), n = lane_size(t, dim);
  check(t.numel() != 0 || n != 0, "mode: dimension ", dim, " of shape ", to_string(t.sizes()), " is empty");
  check_length(op, n);
  keep_one(op, t, dim, keepdim != 0, ret0, ret1, [&](const Tensor& values, const Tensor& indices) {
    run(
        op, {&t}, [&] { kernels::cpu::mode(sort_params(op, dim, values, indices, t)); },
        [&](const auto& on) { mode_on(on, op, t, dim, values, indices); });
  });
}

UNTORCH_OP(median, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  median_of_all(op, self, Select::kMedian, ret0);
}

UNTORCH_OP(nanmedian, (AtenTensorHandle self, AtenTensorHandle* ret0), self, ret0) {
  median_of_all(op, self, Select::kNanMedian, ret0);
}
