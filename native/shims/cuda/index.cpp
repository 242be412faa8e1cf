// index, index_put and masked_scatter (aoti_torch_cuda_*), and aoti_torch_index_put_out for CUDA tensors.
//
// Masks become positions, whose number the host must know: an index expression with one waits for the device and cannot
// be captured. The exception is x[mask] = one value, which needs no positions. Everything else is enqueued only; an
// index out of range is reported as cuda/device_error.h says.
#include "kernels/cuda/indexing/index.h"

#include <deque>
#include <numeric>

#include "kernels/cuda/elementwise/copy.h"
#include "shims/cuda/sorting.h"
#include "shims/device_ops.h"
#include "shims/indexing.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::DeviceFault;

namespace {

using Indices = std::vector<const Tensor*>;

const Tensor& index_tensor(AtenTensorHandle handle, const Tensor& self, const char* op) {
  const Tensor& t = cuda_input(handle, op, "indices");
  check(t.device() == self.device(), op, ": argument 'indices' is on ", device_name(t.device()), ", 'self' on ",
        device_name(self.device()), ", expected one device");
  return t;
}

Indices optional_list(const AtenTensorHandle** handles, std::int64_t length, const Tensor& self, const char* op) {
  Indices out;
  for (std::int64_t i = 0; i < length; ++i) {
    const bool absent = handles[i] == nullptr || *handles[i] == nullptr || !unwrap(*handles[i])->defined();
    out.push_back(absent ? nullptr : &index_tensor(*handles[i], self, op));
  }
  return out;
}

bool has_mask(const Indices& indices) {
  return std::any_of(indices.begin(), indices.end(),
                     [](const Tensor* index) { return index != nullptr && is_index_mask(*index); });
}

const std::uint8_t* flags_of(const Tensor& mask) { return static_cast<const std::uint8_t*>(mask.raw()); }

// ranks[i]: how many elements of the dense mask are set up to and with the i-th.
StorageRef ranks_of(const OnDevice& on, const Tensor& mask) {
  const std::int64_t n = mask.numel();
  StorageRef ranks = on.scratch(static_cast<std::size_t>(n) * sizeof(std::int64_t));
  auto* const to = static_cast<std::int64_t*>(ranks->data());
  std::size_t bytes = 0;
  on.launched(kernels::cuda::inclusive_count(nullptr, bytes, flags_of(mask), to, n, on.stream()));
  const StorageRef scratch = on.scratch(bytes);
  on.launched(kernels::cuda::inclusive_count(scratch->data(), bytes, flags_of(mask), to, n, on.stream()));
  return ranks;
}

// One int64 tensor for each dimension of the mask. Waits for the count.
void mask_columns(const OnDevice& on, const Tensor& mask, std::deque<TensorPtr>& owned, const char* op) {
  if (cuda::is_capturing(on.stream())) {
    throw_error(ErrorKind::kUnsupported, op,
                ": a mask among the indices makes the number of results depend on data, which a graph cannot hold; "
                "use torch.where, or run without a graph");
  }
  check(mask.dim() <= kMaxDims, op, ": a mask of ", mask.dim(), " dimensions has more than the kernels take (",
        kMaxDims, ")");
  const TensorPtr dense = contiguous(mask);
  const std::int64_t n = dense->numel();
  std::int64_t count = 0;
  StorageRef ranks;
  if (n != 0) {
    ranks = ranks_of(on, *dense);
    const auto last =
        reinterpret_cast<cuda::DevicePtr>(ranks->data()) + static_cast<std::uint64_t>(n - 1) * sizeof count;
    cuda::check_driver(cuda::driver().memcpy_d2h_async(&count, last, sizeof count, on.stream()), op);
    cuda::check_driver(cuda::driver().stream_synchronize(on.stream()), op);
  }
  const TensorPtr columns = Tensor::empty(Dims{mask.dim(), count}, DType::kInt64, on.device());
  if (count != 0) {
    kernels::cuda::Shape shape{static_cast<int>(mask.dim()), {}};
    std::copy(mask.sizes().begin(), mask.sizes().end(), shape.sizes);
    on.launched(kernels::cuda::mask_columns(flags_of(*dense), static_cast<const std::int64_t*>(ranks->data()), n, shape,
                                            columns->data<std::int64_t>(), count, on.stream()));
  }
  const std::int64_t one = 1;
  for (std::int64_t d = 0; d < mask.dim(); ++d) {
    owned.push_back(columns->view(DimSpan(&count, 1), DimSpan(&one, 1), d * count));
  }
}

// An index expression whose offsets are on the device.
struct Plan {
  std::deque<TensorPtr> owned;  // made of masks
  IndexLayout layout;
  StorageRef offsets, ids;
  std::int64_t count = 0;        // of the index positions
  std::int64_t offset_unit = 0;  // divides every offset
  std::int64_t largest = 0;      // offset

  const std::int64_t* data() const { return static_cast<const std::int64_t*>(offsets->data()); }
};

kernels::cuda::IndexList empty_list(const IndexLayout& layout, const char* op) {
  kernels::cuda::IndexList list;
  for (std::size_t i = layout.index_shape.size(); i-- > 0;) {
    list.numel *= layout.index_shape[i];
    if (layout.index_shape[i] == 1) continue;
    check(list.ndim < kMaxDims, op, ": index tensors of shape ", to_string(layout.index_shape),
          " have more dimensions than the kernels take (", kMaxDims, ")");
    list.sizes[list.ndim++] = layout.index_shape[i];
  }
  return list;
}

void append(kernels::cuda::IndexList& list, const Tensor& index, const IndexLayout& layout, std::int64_t size,
            std::int64_t stride, const char* op) {
  const auto strides = broadcast_strides(index, layout.index_shape, op, "indices");
  auto& entry = list.entries[list.count++];
  entry = {index.raw(), size, stride, {}, index.dtype() == DType::kInt64};
  int d = 0;
  for (std::size_t i = layout.index_shape.size(); i-- > 0;) {
    if (layout.index_shape[i] != 1) entry.strides[d++] = strides[i];
  }
}

// What can be known before the device is touched: everything, unless there are masks.
std::optional<IndexLayout> check_expression(const Tensor& self, const Indices& indices, const char* op) {
  check_indices(self, indices, op);
  if (has_mask(indices)) return std::nullopt;
  std::deque<TensorPtr> none;
  IndexLayout layout = index_layout(self, index_entries(self, indices, {}, none), op);
  empty_list(layout, op);
  return layout;
}

Plan prepare(const OnDevice& on, const Tensor& self, const Indices& indices, bool numbered, DeviceFault fault,
             const char* op) {
  Plan plan;
  const auto entries = index_entries(
      self, indices, [&](const Tensor& mask, std::deque<TensorPtr>& owned) { mask_columns(on, mask, owned, op); },
      plan.owned);
  plan.layout = index_layout(self, entries, op);
  kernels::cuda::IndexList list = empty_list(plan.layout, op);
  plan.count = list.numel;
  plan.offsets = on.scratch(static_cast<std::size_t>(plan.count) * sizeof(std::int64_t));
  if (numbered) {
    check_entries(plan.count, op);
    plan.ids = on.scratch(static_cast<std::size_t>(plan.count) * sizeof(std::uint32_t));
  }
  bool add = false;
  const auto flush = [&] {
    on.launched(kernels::cuda::index_offsets(list, static_cast<std::int64_t*>(plan.offsets->data()), add,
                                             numbered ? static_cast<std::uint32_t*>(plan.ids->data()) : nullptr,
                                             cuda::DeviceErrors::word(on.index()), fault, on.stream()));
    add = true;
    list.count = 0;
  };
  for (const std::size_t d : plan.layout.used) {
    const std::int64_t size = self.sizes()[d], stride = self.strides()[d];
    if (list.count == kernels::cuda::kMaxIndices) flush();
    append(list, *entries[d], plan.layout, size, stride, op);
    plan.offset_unit = std::gcd(plan.offset_unit, stride);
    plan.largest += std::max<std::int64_t>(size - 1, 0) * stride;
  }
  flush();
  return plan;
}

// A tensor on the device for a 0-D value on the CPU: written by a kernel, so that a graph keeps it.
TensorPtr scalar_on_device(const OnDevice& on, const Tensor& value, DType dtype) {
  const TensorPtr host = to_dtype(value, dtype);
  TensorPtr out = Tensor::empty(DimSpan{}, dtype, on.device());
  on.launched(kernels::cuda::fill(strided<1>("fill", out->sizes(), {out.get()}), out->raw(), host->raw(),
                                  static_cast<int>(element_size(dtype)), on.stream()));
  return out;
}

// 'values': on the device, or one value on the CPU.
const Tensor& values_input(AtenTensorHandle handle, const char* op) {
  const Tensor& t = input(handle, op, "values");
  return t.device().type == DeviceType::kCPU && t.dim() == 0 ? t : cuda_input(handle, op, "values");
}

void check_values(const Tensor& self, const Indices& indices, const Tensor& values, const char* op) {
  check(values.numel() == 1 || values.dtype() == self.dtype(), op, ": 'values' is ", dtype_name(values.dtype()),
        ", expected ", dtype_name(self.dtype()), " as 'self'");
  check(element_size(self.dtype()) <= 16 && is_known(self.dtype()), op, ": dtype ", dtype_name(self.dtype()),
        " is not supported");
  const auto layout = check_expression(self, indices, op);
  if (layout) broadcast_strides(values, layout->shape, op, "values");
}

void check_accumulated(DType dtype, const char* op) {
  if (is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool || dtype == DType::kComplex64 ||
      dtype == DType::kComplex128) {
    return;
  }
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " cannot be accumulated");
}

// The mask when the expression is one mask (and whole dimensions), with the dimension that it starts at.
const Tensor* only_mask(const Indices& indices, std::int64_t& dim) {
  const Tensor* mask = nullptr;
  for (std::size_t i = 0; i < indices.size(); ++i) {
    if (indices[i] == nullptr) continue;
    if (mask != nullptr || !is_index_mask(*indices[i])) return nullptr;
    mask = indices[i];
    dim = static_cast<std::int64_t>(i);
  }
  return mask;
}

void fill_where(const OnDevice& on, const Tensor& out, const Tensor& mask, std::int64_t dim, const Tensor& value,
                const char* op) {
  Dims strides;
  strides.resize(out.sizes().size());
  for (std::int64_t d = 0; d < mask.dim(); ++d) strides[static_cast<std::size_t>(dim + d)] = mask.stride(d);
  const auto space = space_of<2>(op, out.sizes(), {DimSpan(out.strides()), DimSpan(strides)});
  on.launched(kernels::cuda::masked_fill(space, out.raw(), flags_of(mask), value.raw(),
                                         static_cast<int>(element_size(out.dtype())), on.stream()));
}

// out[indices] = values, or += with `accumulate`. Everything was checked.
void put(const OnDevice& on, const Tensor& out, const Indices& indices, const Tensor& values, bool accumulate,
         const char* op) {
  if (out.numel() == 0 && !has_mask(indices)) {
    // Nothing to write; an index into a dimension of size 0 is still an error, which the offsets report.
    prepare(on, out, indices, false, DeviceFault::kIndexPut, op);
    return;
  }
  TensorPtr made;
  if (values.device().type == DeviceType::kCPU) {
    made = scalar_on_device(on, values, out.dtype());
  } else if (values.dtype() != out.dtype()) {
    made = to_dtype(values, out.dtype());
  } else if (values.storage().get() == out.storage().get()) {
    made = Tensor::empty(values.sizes(), values.dtype(), on.device());  // what is read may not change under the writes
    copy(*made, values);
  }
  const Tensor& source = made ? *made : values;
  std::int64_t dim = 0;
  if (const Tensor* const mask = only_mask(indices, dim); mask != nullptr && !accumulate && source.numel() == 1) {
    fill_where(on, out, *mask, dim, source, op);
    return;
  }
  const Plan plan = prepare(on, out, indices, accumulate, DeviceFault::kIndexPut, op);
  const IndexLayout& layout = plan.layout;
  const auto value_strides = broadcast_strides(source, layout.shape, op, "values");
  if (plan.count == 0) return;
  const int bytes = static_cast<int>(element_size(out.dtype()));
  if (!accumulate) {
    const Dims order = contiguous_strides(layout.shape);
    const auto space = space_of<4>(
        op, layout.shape,
        {DimSpan(order), DimSpan(layout.self_strides), DimSpan(layout.offset_strides), DimSpan(value_strides)});
    on.launched(kernels::cuda::index_put(space, out.raw(), plan.data(), source.raw(), bytes, on.stream()));
    return;
  }
  const auto begin = static_cast<std::ptrdiff_t>(layout.first_index_dim),
             end = begin + static_cast<std::ptrdiff_t>(layout.index_shape.size());
  const auto slice_of = [&](std::vector<std::int64_t> all) {
    all.erase(all.begin() + begin, all.begin() + end);
    return all;
  };
  const auto slice_shape = slice_of(layout.shape), slice_out = slice_of(layout.self_strides),
             slice_values = slice_of(value_strides);
  const std::vector<std::int64_t> index_values(value_strides.begin() + begin, value_strides.begin() + end);
  const Dims slice_order = contiguous_strides(slice_shape), index_order = contiguous_strides(layout.index_shape);
  const auto slice = space_of<3>(op, slice_shape, {DimSpan(slice_order), DimSpan(slice_out), DimSpan(slice_values)});
  const auto positions = space_of<2>(op, layout.index_shape, {DimSpan(index_order), DimSpan(index_values)});
  const SortedSegments sorted = sort_segments(on, plan.offsets, plan.ids, plan.count, plan.largest);
  on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, out.raw(), source.raw(), out.dtype(),
                                             kernels::cuda::ReduceOp::kSum, true, on.stream()));
}

AOTITorchError index_put_out(AtenTensorHandle out, AtenTensorHandle self, const AtenTensorHandle* indices,
                             std::uint32_t num_indices, AtenTensorHandle values, bool accumulate) {
  const char* op = "index_put";
  return guarded(op, [&] {
    const Tensor& to = cuda_input(out, op, "out");
    const Tensor& t = cuda_input(self, op, "self");
    const Tensor& source = values_input(values, op);
    check(to.sizes() == t.sizes() && to.dtype() == t.dtype(), op, ": 'out' is ", dtype_name(to.dtype()), " ",
          to_string(to.sizes()), ", expected ", dtype_name(t.dtype()), " ", to_string(t.sizes()), " as 'self'");
    Indices list;
    for (std::uint32_t i = 0; i < num_indices; ++i) {
      const bool absent = indices[i] == nullptr || !unwrap(indices[i])->defined();
      list.push_back(absent ? nullptr : &index_tensor(indices[i], t, op));
    }
    check_values(t, list, source, op);
    if (accumulate) check_accumulated(t.dtype(), op);
    const OnDevice on(op, to, {&t, source.device().type == DeviceType::kCPU ? nullptr : &source});
    TensorPtr kept;
    if (to.numel() != 0 && (to.raw() != t.raw() || to.strides() != t.strides())) {
      if (source.storage().get() == to.storage().get()) {
        kept = Tensor::empty(source.sizes(), source.dtype(), on.device());
        copy(*kept, source);
      }
      copy(to, t);
    }
    put(on, to, list, kept ? *kept : source, accumulate, op);
  });
}

[[maybe_unused]] const bool registered = [] {
  cuda_ops.index_put_out = index_put_out;
  return true;
}();

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_index_Tensor(AtenTensorHandle self, const AtenTensorHandle** indices,
                                          std::int64_t indices_len_, AtenTensorHandle* ret0) {
  const char* op = "index";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const Indices list = optional_list(indices, indices_len_, t, op);
    check(element_size(t.dtype()) <= 16 && is_known(t.dtype()), op, ": dtype ", dtype_name(t.dtype()),
          " is not supported");
    check_expression(t, list, op);
    const OnDevice on(op, t);
    const Plan plan = prepare(on, t, list, false, DeviceFault::kIndex, op);
    const IndexLayout& layout = plan.layout;
    TensorPtr out =
        Tensor::empty_strided(layout.shape, elementwise_strides(layout.shape, layout.layouts), t.dtype(), on.device());
    const auto space = space_of<3>(
        op, layout.shape, {DimSpan(out->strides()), DimSpan(layout.self_strides), DimSpan(layout.offset_strides)});
    on.launched(kernels::cuda::index_gather(space, out->raw(), t.raw(), plan.data(), plan.offset_unit,
                                            static_cast<int>(element_size(t.dtype())), on.stream()));
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_index_put(AtenTensorHandle self, const AtenTensorHandle** indices,
                                       std::int64_t indices_len_, AtenTensorHandle values, std::int32_t accumulate,
                                       AtenTensorHandle* ret0) {
  const char* op = "index_put";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const Indices list = optional_list(indices, indices_len_, t, op);
    const Tensor& source = values_input(values, op);
    check_values(t, list, source, op);
    if (accumulate != 0) check_accumulated(t.dtype(), op);
    const OnDevice on(op, t, {source.device().type == DeviceType::kCPU ? nullptr : &source});
    TensorPtr out = clone_like(t);
    put(on, *out, list, source, accumulate != 0, op);
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_masked_scatter(AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle source,
                                            AtenTensorHandle* ret0) {
  const char* op = "masked_scatter";
  return guarded(op, [&] {
    const Tensor& t = cuda_input(self, op, "self");
    const Tensor& m = cuda_input(mask, op, "mask");
    const Tensor& src = cuda_input(source, op, "source");
    check(m.dtype() == DType::kBool, op, ": 'mask' must be bool, got ", dtype_name(m.dtype()));
    check(t.dtype() == src.dtype(), op, ": 'source' is ", dtype_name(src.dtype()), ", expected ", dtype_name(t.dtype()),
          " as 'self'");
    check(element_size(t.dtype()) <= 16 && is_known(t.dtype()), op, ": dtype ", dtype_name(t.dtype()),
          " is not supported");
    const auto shape = broadcast_shapes(t.sizes(), m.sizes(), op);
    const OnDevice on(op, t, {&m, &src});
    TensorPtr out = clone_like(expand(t, shape, op, "self"));
    if (out->numel() != 0) {
      const TensorPtr chosen = contiguous(expand(m, shape, op, "mask")), values = contiguous(src);
      const StorageRef ranks = ranks_of(on, *chosen);
      const auto space = space_of<2>(op, shape, {DimSpan(out->strides()), DimSpan(chosen->strides())});
      on.launched(kernels::cuda::masked_scatter(space, out->raw(), flags_of(*chosen),
                                                static_cast<const std::int64_t*>(ranks->data()), values->raw(),
                                                values->numel(), static_cast<int>(element_size(t.dtype())),
                                                cuda::DeviceErrors::word(on.index()), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}
