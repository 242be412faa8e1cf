// aten::_unique, aten::_unique2, aten::unique_consecutive and aten::bincount on a GPU. Sizes depend on data: they wait
// for it.
#include "kernels/unique.h"

#include <algorithm>

#include "kernels/sort.h"
#include "shims/device_work.h"
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct Unique {
  TensorPtr values, inverse, counts;
};

// Which of the two are wanted; the others are empty, as in PyTorch.
struct Wanted {
  bool inverse, counts;
};

template <class On>
Unique unique_on(const On& on, const Op& op, const Tensor& t, bool sort, Wanted wanted) {
  refuse_capture(on, op, "the size of the result depends on the data");
  const std::int64_t n = t.numel(), one = 1;
  const Device device = on.device();
  const auto row = [&](std::int64_t size, DType dtype) { return Tensor::empty(Dims{size}, dtype, device); };
  Unique out;
  out.inverse = wanted.inverse ? Tensor::empty(t.sizes(), DType::kInt64, device) : row(0, DType::kInt64);
  if (n == 0) {
    out.values = row(0, t.dtype());
    out.counts = row(0, DType::kInt64);
    return out;
  }
  TensorPtr dense = contiguous(t), order;
  if (sort) {
    const TensorPtr flat = dense->view({&n, 1}, {&one, 1}, dense->storage_offset());
    TensorPtr sorted = row(n, t.dtype());
    order = row(n, DType::kInt64);
    kernels::SortParams params;
    params.lanes = lanes<3>(op, 0, {sorted.get(), order.get(), flat.get()});
    params.values = sorted->raw();
    params.indices = order->template data<std::int64_t>();
    params.input = flat->raw();
    params.dtype = t.dtype();
    params.take = n;
    std::size_t bytes = 0;
    on.launched(kernels::cuda::sort_scratch(params, bytes));
    with_scratch(on, bytes, [&](void* scratch) { return kernels::cuda::sort(params, scratch, on.stream()); });
    dense = std::move(sorted);
  }
  const kernels::cuda::Groups groups{dense->raw(), t.dtype(), n,
                                     order ? order->template data<std::int64_t>() : nullptr};
  const TensorPtr flags = row(n, DType::kUInt8);
  on.launched(kernels::cuda::mark_groups(groups, static_cast<std::uint8_t*>(flags->raw()), on.stream()));
  const StorageRef ranks = mask_ranks(on, *flags);
  const auto* const rank = static_cast<const std::int64_t*>(ranks->data());
  std::int64_t count = 0;
  read_back(on, op, rank + n - 1, &count, 1);
  out.values = row(count, t.dtype());
  out.counts = row(wanted.counts ? count : 0, DType::kInt64);
  const TensorPtr starts = wanted.counts ? row(count, DType::kInt64) : nullptr;
  std::int64_t* const start = starts ? starts->template data<std::int64_t>() : nullptr;
  on.launched(kernels::cuda::write_groups(
      groups, static_cast<const std::uint8_t*>(flags->raw()), rank, out.values->raw(),
      wanted.inverse ? out.inverse->template data<std::int64_t>() : nullptr, start, on.stream()));
  if (wanted.counts) {
    on.launched(kernels::cuda::count_groups(start, out.counts->template data<std::int64_t>(), count, n, on.stream()));
  }
  return out;
}

void unique(const Op& op, const ProxyCall& call, bool sort) {
  const Tensor& t = call.tensor("self");
  check_ordered(op, t);
  const Wanted wanted{call.flag("return_inverse", false), call.flag("return_counts", false)};
  if (t.numel() > kernels::cuda::kSortMax) {
    throw_error(ErrorKind::kUnsupported, op, ": ", t.numel(), " elements, expected at most ", kernels::cuda::kSortMax);
  }
  Unique out;
  run(op, {&t}, [] {}, [&](const auto& on) { out = unique_on(on, op, t, sort, wanted); });
  call.give(0, std::move(out.values));
  call.give(1, std::move(out.inverse));
  call.give(2, std::move(out.counts));
}

}  // namespace

// Sorted in any case: sorted=False only permits another order.
UNTORCH_PROXY_OP(unique2, "aten::_unique2", kOnCuda) { unique(op, call, true); }

UNTORCH_PROXY_OP(unique1, "aten::_unique", kOnCuda) { unique(op, call, true); }

UNTORCH_PROXY_OP(unique_consecutive, "aten::unique_consecutive", kOnCuda) {
  const std::optional<std::int64_t> dim = call.optional_integer("dim");
  if (dim && (call.tensor("self").dim() != 1 || (*dim != 0 && *dim != -1))) {
    throw_error(ErrorKind::kUnsupported, op, ": 'dim' is ", *dim, " of a tensor of ", call.tensor("self").dim(),
                " dimensions; on a GPU only None is supported, or 0 for one dimension");
  }
  unique(op, call, false);
}

// Weights are added by atomics, in no fixed order.
UNTORCH_PROXY_OP(bincount, "aten::bincount", kOnCuda) {
  const Tensor& t = call.tensor("self");
  const Tensor* const weights = call.optional_tensor("weights");
  const std::int64_t least = call.integer("minlength", 0);
  check(t.dim() == 1 && is_integral(t.dtype()), op, ": argument 'self' must be one dimension of integers, got ",
        dtype_name(t.dtype()), to_string(t.sizes()));
  check(least >= 0, op, ": 'minlength' is ", least, ", expected 0 or more");
  check(weights == nullptr || weights->sizes() == t.sizes(), op, ": argument 'weights' is ",
        weights == nullptr ? to_string(t.sizes()) : to_string(weights->sizes()), ", expected ", to_string(t.sizes()),
        " as 'self'");
  op.check_same_device({&t, weights});
  const DType sum = weights == nullptr                    ? DType::kInt64
                    : weights->dtype() == DType::kFloat32 ? DType::kFloat32
                                                          : DType::kFloat64;
  TensorPtr out;
  run(
      op, {&t, weights}, [] {},
      [&](const auto& on) {
        refuse_capture(on, op, "the size of the result depends on the data");
        const std::int64_t n = t.size(0);
        std::int64_t bins = least;
        if (n != 0) {
          // From {-1, …}: values are at least 0, or an error.
          const std::int64_t empty = -1;
          const TensorPtr range = Tensor::empty(Dims{2}, DType::kInt64, on.device()),
                          start = Tensor::scalar(empty, DType::kInt64);
          fill_on_device(on, *range, *start);
          auto* const ends = range->template data<std::int64_t>();
          cuda::check_driver(cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(ends + 1), 0x7f,
                                                            sizeof *ends, on.stream()),
                             op);
          on.launched(kernels::cuda::integer_range(t.raw(), t.dtype(), n, t.stride(0), ends, on.stream()));
          std::int64_t seen[2] = {};
          read_back(on, op, ends, seen, 2);
          check(seen[1] >= 0, op, ": argument 'self' holds ", seen[1], ", expected no negative value");
          bins = std::max(bins, seen[0] + 1);
        }
        out = Tensor::zeros(Dims{bins}, sum, on.device());
        const TensorPtr added = weights == nullptr ? nullptr : to_dtype(*weights, sum);
        kernels::cuda::Bincount p;
        p.values = t.raw(), p.dtype = t.dtype(), p.n = n, p.step = n == 0 ? 1 : t.stride(0);
        if (added) p.weights = added->raw(), p.weight_dtype = sum, p.weight_step = n == 0 ? 1 : added->stride(0);
        p.out = out->raw(), p.bins = bins;
        on.launched(kernels::cuda::bincount(p, on.stream()));
      });
  call.give(0, std::move(out));
}
