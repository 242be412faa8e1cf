// sort, topk, kthvalue, median, nanmedian and mode (aoti_torch_cpu_*).
#include "kernels/cpu/sort/sort.h"

#include <atomic>

#include "shims/cpu/elementwise.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Keyed;

namespace {

// Roughly n·log2(n), for deciding whether to go parallel.
std::int64_t sort_cost(std::int64_t n) {
  std::int64_t log = 1;
  while ((std::int64_t{1} << log) < n) ++log;
  return n * log;
}

// Runs lane(keyed, values, value_stride, indices, index_stride) for every lane of `self` along `dim`; `values` and
// `indices` have self's number of dimensions. A lane that runs out of memory is reported after the loop.
template <class Lane>
void keyed_lanes(const Tensor& self, const Tensor& values, const Tensor& indices, std::int64_t dim, const char* op,
                 Lane&& lane) {
  const std::int64_t n = lane_size(self, dim), step = lane_stride(self, dim);
  const std::int64_t value_step = lane_stride(values, dim), index_step = lane_stride(indices, dim);
  std::atomic<bool> out_of_memory{false};
  dispatch_real(op, self.dtype(), [&]<class T>() {
    const T* from = self.data<T>();
    T* to = values.data<T>();
    auto* at = indices.data<std::int64_t>();
    for_each_lane<3>({&values, &indices, &self}, dim, self.sizes(), sort_cost(n),
                     [&](const std::array<std::int64_t, 3>& offset) {
                       try {
                         static thread_local std::vector<Keyed<T>> keyed;
                         kernels::load_lane(keyed, from + offset[2], step, n);
                         lane(keyed, to + offset[0], value_step, at + offset[1], index_step);
                       } catch (const std::bad_alloc&) {
                         out_of_memory = true;
                       }
                     });
  });
  if (out_of_memory) throw std::bad_alloc();
}

template <class T>
void store(const std::vector<Keyed<T>>& keyed, std::int64_t count, T* values, std::int64_t value_step,
           std::int64_t* indices, std::int64_t index_step) {
  for (std::int64_t i = 0; i < count; ++i) {
    values[i * value_step] = keyed[static_cast<std::size_t>(i)].value;
    indices[i * index_step] = keyed[static_cast<std::size_t>(i)].index;
  }
}

void sort_impl(AtenTensorHandle self, std::int64_t dim_arg, bool descending, AtenTensorHandle* ret0,
               AtenTensorHandle* ret1) {
  const Tensor& t = cpu_input(self, "sort", "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "sort");
  TensorPtr values = empty_like(t, t.dtype()), indices = empty_like(t, DType::kInt64);
  keyed_lanes(t, *values, *indices, dim, "sort",
              [&](auto& keyed, auto* to, std::int64_t vs, auto* at, std::int64_t is) {
                kernels::sort_lane(keyed, descending);
                store(keyed, static_cast<std::int64_t>(keyed.size()), to, vs, at, is);
              });
  give(ret0, std::move(values), "sort");
  give(ret1, std::move(indices), "sort");
}

// Operators that keep one element a lane. pick(keyed) chooses it.
template <class Pick>
void select_one(AtenTensorHandle self, std::int64_t dim_arg, std::int32_t keepdim, AtenTensorHandle* ret0,
                AtenTensorHandle* ret1, const char* op, Pick&& pick) {
  const Tensor& t = cpu_input(self, op, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  const auto kept = reduced_shape(t.sizes(), dim, true);
  TensorPtr values = Tensor::empty(kept, t.dtype()), indices = Tensor::empty(kept, DType::kInt64);
  if (t.numel() == 0)
    check(lane_size(t, dim) != 0, op, ": dimension ", dim, " of shape ", to_string(t.sizes()), " is empty");
  keyed_lanes(t, *values, *indices, dim, op, [&](auto& keyed, auto* to, std::int64_t, auto* at, std::int64_t) {
    const auto chosen = pick(keyed);
    *to = chosen.value;
    *at = chosen.index;
  });
  if (keepdim == 0) {
    const auto shape = reduced_shape(t.sizes(), dim, false);
    values = values->view(shape, contiguous_strides(shape), 0);
    indices = indices->view(shape, contiguous_strides(shape), 0);
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

void median_of_all(AtenTensorHandle self, bool skip_nan, AtenTensorHandle* ret0, const char* op) {
  const Tensor& t = cpu_input(self, op, "self");
  const TensorPtr flat = contiguous(t);
  const std::int64_t n = flat->numel();
  TensorPtr out = Tensor::empty(DimSpan{}, t.dtype());
  dispatch_real(op, t.dtype(), [&]<class T>() {
    if (n == 0) {
      // The median of nothing is NaN for floating types; integers give the smallest value, as in PyTorch.
      if constexpr (std::is_integral_v<T>) {
        *out->data<T>() = std::numeric_limits<T>::lowest();
      } else {
        *out->data<T>() = static_cast<T>(std::numeric_limits<compute_t<T>>::quiet_NaN());
      }
      return;
    }
    std::vector<Keyed<T>> keyed;
    kernels::load_lane(keyed, flat->data<T>(), 1, n);
    *out->data<T>() = kernels::median_of(keyed, skip_nan).value;
  });
  give(ret0, std::move(out), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_sort(AtenTensorHandle self, std::int64_t dim, std::int32_t descending,
                                 AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("sort", [&] { sort_impl(self, dim, descending != 0, ret0, ret1); });
}

UNTORCH_SHIM aoti_torch_cpu_sort_stable(AtenTensorHandle self, std::int32_t*, std::int64_t dim, std::int32_t descending,
                                        AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  // The sort is always stable, so the flag does not matter.
  return guarded("sort", [&] { sort_impl(self, dim, descending != 0, ret0, ret1); });
}

UNTORCH_SHIM aoti_torch_cpu_topk(AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t largest,
                                 std::int32_t, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("topk", [&] {
    const Tensor& t = cpu_input(self, "topk", "self");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "topk");
    const std::int64_t n = lane_size(t, dim);
    check(k >= 0 && k <= n, "topk: k is ", k, ", expected 0 to ", n, " (the size of dimension ", dim, ")");
    std::vector<std::int64_t> shape(t.sizes().begin(), t.sizes().end());
    if (!shape.empty()) shape[static_cast<std::size_t>(dim)] = k;
    TensorPtr values = Tensor::empty(shape, t.dtype()), indices = Tensor::empty(shape, DType::kInt64);
    if (k > 0) {
      // The result is sorted in any case: sorted=False only permits another order.
      keyed_lanes(t, *values, *indices, dim, "topk",
                  [&](auto& keyed, auto* to, std::int64_t vs, auto* at, std::int64_t is) {
                    kernels::select_top(keyed, k, largest != 0);
                    store(keyed, k, to, vs, at, is);
                  });
    }
    give(ret0, std::move(values), "topk");
    give(ret1, std::move(indices), "topk");
  });
}

UNTORCH_SHIM aoti_torch_cpu_kthvalue(AtenTensorHandle self, std::int64_t k, std::int64_t dim_arg, std::int32_t keepdim,
                                     AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded("kthvalue", [&] {
    const Tensor& t = cpu_input(self, "kthvalue", "self");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "kthvalue"), n = lane_size(t, dim);
    check(k >= 1 && k <= n, "kthvalue: k is ", k, ", expected 1 to ", n, " (the size of dimension ", dim, ")");
    select_one(self, dim, keepdim, ret0, ret1, "kthvalue",
               [&](auto& keyed) { return kernels::select_rank(keyed, k - 1); });
  });
}

UNTORCH_SHIM aoti_torch_cpu_mode(AtenTensorHandle self, std::int64_t dim, std::int32_t keepdim, AtenTensorHandle* ret0,
                                 AtenTensorHandle* ret1) {
  return guarded("mode", [&] {
    select_one(self, dim, keepdim, ret0, ret1, "mode", [](auto& keyed) { return kernels::mode_of(keyed); });
  });
}

UNTORCH_SHIM aoti_torch_cpu_median(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("median", [&] { median_of_all(self, false, ret0, "median"); });
}

UNTORCH_SHIM aoti_torch_cpu_nanmedian(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("nanmedian", [&] { median_of_all(self, true, ret0, "nanmedian"); });
}
