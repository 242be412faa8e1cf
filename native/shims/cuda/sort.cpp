// sort, topk, kthvalue, median, nanmedian and mode (aoti_torch_cuda_*).
#include "kernels/cuda/sort/sort.h"

#include <limits>

#include "kernels/cuda/elementwise/copy.h"
#include "kernels/cuda/sort/radix_select.h"
#include "shims/cuda/lanes.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::Select;
using kernels::cuda::SelectJob;
using kernels::cuda::SortJob;

namespace {

void check_length(std::int64_t n, const char* op) {
  if (n > kernels::cuda::kSortMax) {
    throw_error(ErrorKind::kUnsupported, op, ": ", n, " elements in a row, expected at most ", kernels::cuda::kSortMax);
  }
}

const Tensor& ordered_input(AtenTensorHandle self, const char* op) {
  const Tensor& t = cuda_input(self, op, "self");
  check_ordered(t, op);
  return t;
}

SortJob sort_job(const char* op, std::int64_t dim, const Tensor& values, const Tensor& indices, const Tensor& t) {
  SortJob job;
  job.lanes = lanes<3>(op, dim, {&values, &indices, &t});
  job.values = values.raw();
  job.indices = indices.data<std::int64_t>();
  job.input = t.raw();
  job.dtype = t.dtype();
  job.take = job.lanes.n;
  return job;
}

void run(const OnDevice& on, const SortJob& job) {
  std::size_t bytes = 0;
  on.launched(kernels::cuda::sort_scratch(job, bytes));
  const StorageRef scratch = bytes == 0 ? StorageRef() : on.scratch(bytes);
  on.launched(kernels::cuda::sort(job, bytes == 0 ? nullptr : scratch->data(), on.stream()));
}

void run(const OnDevice& on, const SelectJob& job) {
  std::size_t bytes = 0;
  on.launched(kernels::cuda::select_scratch(job, bytes));
  const StorageRef scratch = on.scratch(bytes);
  on.launched(kernels::cuda::select(job, scratch->data(), on.stream()));
}

void sort_impl(AtenTensorHandle self, std::int64_t dim_arg, bool descending, AtenTensorHandle* ret0,
               AtenTensorHandle* ret1) {
  const Tensor& t = ordered_input(self, "sort");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "sort");
  check_length(lane_size(t, dim), "sort");
  const OnDevice on("sort", t);
  TensorPtr values = empty_like(t, t.dtype()), indices = empty_like(t, DType::kInt64);
  if (t.numel() != 0) {
    SortJob job = sort_job("sort", dim, *values, *indices, t);
    job.descending = descending;
    run(on, job);
  }
  give(ret0, std::move(values), "sort");
  give(ret1, std::move(indices), "sort");
}

// Operators that keep one element a row. fill(on, values, indices) writes them; both have self's rank.
template <class Fill>
void keep_one(const Tensor& t, std::int64_t dim, bool keepdim, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
              const char* op, Fill&& fill) {
  const auto kept = reduced_shape(t.sizes(), dim, true);
  const OnDevice on(op, t);
  TensorPtr values = Tensor::empty(kept, t.dtype(), t.device()),
            indices = Tensor::empty(kept, DType::kInt64, t.device());
  if (t.numel() != 0) fill(on, *values, *indices);
  if (!keepdim) {
    const auto shape = reduced_shape(t.sizes(), dim, false);
    values = values->view(shape, contiguous_strides(shape), 0);
    indices = indices->view(shape, contiguous_strides(shape), 0);
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

// The median of nothing is NaN for floating types; integers give the smallest value.
TensorPtr median_of_nothing(const OnDevice& on, const Tensor& t) {
  TensorPtr out = Tensor::empty(DimSpan{}, t.dtype(), t.device());
  std::byte value[8] = {};
  dispatch_real("median", t.dtype(), [&]<class T>() {
    T made;
    if constexpr (std::is_integral_v<T>) {
      made = std::numeric_limits<T>::lowest();
    } else {
      made = static_cast<T>(std::numeric_limits<compute_t<T>>::quiet_NaN());
    }
    std::memcpy(value, &made, sizeof made);
  });
  const auto space = strided<1>("median", out->sizes(), {out.get()});
  on.launched(kernels::cuda::fill(space, out->raw(), value, static_cast<int>(element_size(t.dtype())), on.stream()));
  return out;
}

void median_of_all(AtenTensorHandle self, Select what, AtenTensorHandle* ret0, const char* op) {
  const Tensor& t = ordered_input(self, op);
  check_length(t.numel(), op);
  const OnDevice on(op, t);
  if (t.numel() == 0) {
    give(ret0, median_of_nothing(on, t), op);
    return;
  }
  const TensorPtr dense = contiguous(t);
  const std::int64_t n = t.numel(), one = 1;
  const TensorPtr flat = dense->view({&n, 1}, {&one, 1}, dense->storage_offset());
  TensorPtr out = Tensor::empty(DimSpan{}, t.dtype(), t.device());
  const TensorPtr kept = out->view({&one, 1}, {&one, 1}, 0);
  SelectJob job;
  job.what = what;
  job.sort.lanes = lanes<3>(op, 0, {kept.get(), kept.get(), flat.get()});
  job.sort.values = out->raw();
  job.sort.input = flat->raw();
  job.sort.dtype = t.dtype();
  run(on, job);
  give(ret0, std::move(out), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_sort(AtenTensorHandle self, std::int64_t dim, std::int32_t descending,
                                  AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("sort", [&] { sort_impl(self, dim, descending != 0, ret0, ret1); });
}

UNTORCH_SHIM aoti_torch_cuda_sort_stable(AtenTensorHandle self, std::int32_t*, std::int64_t dim,
                                         std::int32_t descending, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  // The sort is always stable, so the flag does not matter.
  return guarded("sort", [&] { sort_impl(self, dim, descending != 0, ret0, ret1); });
}

UNTORCH_SHIM aoti_torch_cuda_topk(AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t largest,
                                  std::int32_t, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("topk", [&] {
    const Tensor& t = ordered_input(self, "topk");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "topk"), n = lane_size(t, dim);
    check(k >= 0 && k <= n, "topk: k is ", k, ", expected 0 to ", n, " (the size of dimension ", dim, ")");
    check_length(n, "topk");
    std::vector<std::int64_t> shape(t.sizes().begin(), t.sizes().end());
    if (!shape.empty()) shape[static_cast<std::size_t>(dim)] = k;
    const OnDevice on("topk", t);
    TensorPtr values = Tensor::empty(shape, t.dtype(), t.device()),
              indices = Tensor::empty(shape, DType::kInt64, t.device());
    if (k > 0 && t.numel() != 0) {
      // The result is sorted in any case: sorted=False only permits another order. Equal elements: lowest index first.
      SortJob job = sort_job("topk", dim, *values, *indices, t);
      job.descending = largest != 0;
      job.take = k;
      if (n <= kernels::cuda::kBlockSortMax || k > kernels::cuda::kSelectMax) {
        run(on, job);
      } else {
        run(on, SelectJob{job, Select::kFirst, k});
      }
    }
    give(ret0, std::move(values), "topk");
    give(ret1, std::move(indices), "topk");
  });
}

UNTORCH_SHIM aoti_torch_cuda_kthvalue(AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t keepdim,
                                      AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("kthvalue", [&] {
    const Tensor& t = ordered_input(self, "kthvalue");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "kthvalue"), n = lane_size(t, dim);
    check(k >= 1 && k <= n, "kthvalue: k is ", k, ", expected 1 to ", n, " (the size of dimension ", dim, ")");
    check_length(n, "kthvalue");
    keep_one(t, dim, keepdim != 0, ret0, ret1, "kthvalue",
             [&](const OnDevice& on, const Tensor& values, const Tensor& indices) {
               SortJob job = sort_job("kthvalue", dim, values, indices, t);
               job.first = k - 1;
               job.take = 1;
               if (n <= kernels::cuda::kBlockSortMax) {
                 run(on, job);
               } else {
                 run(on, SelectJob{job, Select::kRank, k - 1});
               }
             });
  });
}

UNTORCH_SHIM aoti_torch_cuda_mode(AtenTensorHandle self, std::int64_t dim_arg, std::int32_t keepdim,
                                  AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("mode", [&] {
    const Tensor& t = ordered_input(self, "mode");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "mode"), n = lane_size(t, dim);
    check(t.numel() != 0 || n != 0, "mode: dimension ", dim, " of shape ", to_string(t.sizes()), " is empty");
    check_length(n, "mode");
    keep_one(
        t, dim, keepdim != 0, ret0, ret1, "mode", [&](const OnDevice& on, const Tensor& values, const Tensor& indices) {
          // The sorted rows lie one after the other, in the order of the results' elements.
          const std::int64_t rows = t.numel() / n;
          const TensorPtr sorted = Tensor::empty(Dims{rows, n}, t.dtype(), t.device()),
                          order = Tensor::empty(Dims{rows, n}, DType::kInt64, t.device());
          Dims shape = t.sizes(), strides;
          strides.resize(shape.size());
          std::int64_t step = n;
          for (std::size_t d = shape.size(); d-- > 0;) {
            if (static_cast<std::int64_t>(d) == dim) {
              strides[d] = 1;
            } else {
              strides[d] = step;
              step *= shape[d];
            }
          }
          const TensorPtr sorted_view = sorted->view(shape, strides, 0), order_view = order->view(shape, strides, 0);
          run(on, sort_job("mode", dim, *sorted_view, *order_view, t));
          const std::int64_t one = 1;
          const TensorPtr flat_values = values.view({&rows, 1}, {&one, 1}, 0),
                          flat_indices = indices.view({&rows, 1}, {&one, 1}, 0);
          on.launched(kernels::cuda::mode(
              strided<2>("mode", flat_values->sizes(), {flat_values.get(), flat_indices.get()}), values.raw(),
              indices.data<std::int64_t>(), sorted->raw(), order->data<std::int64_t>(), n, t.dtype(), on.stream()));
        });
  });
}

UNTORCH_SHIM aoti_torch_cuda_median(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("median", [&] { median_of_all(self, Select::kMedian, ret0, "median"); });
}

UNTORCH_SHIM aoti_torch_cuda_nanmedian(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("nanmedian", [&] { median_of_all(self, Select::kNanMedian, ret0, "nanmedian"); });
}
