// index and index_put.
//
// On the GPU, masks become positions, whose number the host must know: an index expression with one waits for the
// device and cannot be captured. The exception is x[mask] = one value, which needs no positions. Everything else is
// enqueued only; an index out of range is reported as cuda/device_error.h says.
#include "kernels/index.h"

#include <algorithm>
#include <deque>
#include <numeric>

#include "shims/broadcast.h"
#include "shims/device_work.h"
#include "shims/indexing.h"
#include "shims/layout.h"
#include "shims/segments.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::IndexList;
using kernels::cuda::DeviceFault;

namespace {

using Indices = std::vector<const Tensor*>;

const Tensor* index_input(const Op& op, AtenTensorHandle handle, const Tensor& self) {
  if (handle == nullptr || !unwrap(handle)->defined()) return nullptr;
  const Tensor& t = op.input(handle, "indices");
  check(!op.on_cuda() || t.device() == self.device(), op, ": argument 'indices' is on ", device_name(t.device()),
        ", 'self' on ", device_name(self.device()), ", expected one device");
  return &t;
}

Indices optional_list(const Op& op, const AtenTensorHandle** handles, std::int64_t length, const Tensor& self) {
  Indices out;
  for (std::int64_t i = 0; i < length; ++i) {
    out.push_back(handles[i] == nullptr ? nullptr : index_input(op, *handles[i], self));
  }
  return out;
}

bool has_mask(const Indices& indices) {
  return std::any_of(indices.begin(), indices.end(),
                     [](const Tensor* index) { return index != nullptr && is_index_mask(*index); });
}

const std::uint8_t* flags_of(const Tensor& mask) { return static_cast<const std::uint8_t*>(mask.raw()); }

IndexList empty_list(const Op& op, const IndexLayout& layout) {
  IndexList list;
  for (std::size_t i = layout.index_shape.size(); i-- > 0;) {
    list.numel *= layout.index_shape[i];
    if (layout.index_shape[i] == 1) continue;
    check(list.ndim < kMaxDims, op, ": index tensors of shape ", to_string(layout.index_shape),
          " have more dimensions than the kernels take (", kMaxDims, ")");
    list.sizes[list.ndim++] = layout.index_shape[i];
  }
  return list;
}

void append(const Op& op, IndexList& list, const Tensor& index, const IndexLayout& layout, std::int64_t size,
            std::int64_t stride) {
  const auto strides = broadcast_strides(index, layout.index_shape, op, "indices");
  auto& entry = list.entries[list.count++];
  entry = {index.raw(), size, stride, {}, index.dtype() == DType::kInt64};
  int d = 0;
  for (std::size_t i = layout.index_shape.size(); i-- > 0;) {
    if (layout.index_shape[i] != 1) entry.strides[d++] = strides[i];
  }
}

// What can be known without a look at the values: everything, unless there are masks.
std::optional<IndexLayout> check_expression(const Op& op, const Tensor& self, const Indices& indices) {
  check_indices(self, indices, op);
  if (has_mask(indices)) return std::nullopt;
  std::deque<TensorPtr> none;
  IndexLayout layout = index_layout(self, index_entries(self, indices, {}, none), op);
  empty_list(op, layout);
  return layout;
}

void check_width(const Op& op, DType dtype) {
  check(element_size(dtype) <= 16 && is_known(dtype), op, ": dtype ", dtype_name(dtype), " is not supported");
}

void check_values(const Op& op, const Tensor& self, const Indices& indices, const Tensor& values, bool accumulate) {
  const DType dtype = self.dtype();
  check(values.numel() == 1 || values.dtype() == dtype, op, ": 'values' is ", dtype_name(values.dtype()), ", expected ",
        dtype_name(dtype), " as 'self'");
  check_width(op, dtype);
  const auto layout = check_expression(op, self, indices);
  if (layout) broadcast_strides(values, layout->shape, op, "values");
  const bool adds = is_floating(dtype) || is_integral(dtype) || dtype == DType::kBool || dtype == DType::kComplex64 ||
                    dtype == DType::kComplex128;
  if (accumulate && !adds) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " cannot be accumulated");
  }
}

// 'values': on the operator's device, or one value on the CPU.
const Tensor& values_input(const Op& op, AtenTensorHandle handle) {
  const Tensor& t = input(handle, op, "values");
  return t.device().type == DeviceType::kCPU && t.dim() == 0 ? t : op.input(handle, "values");
}

// The operand to compare devices with: a value on the CPU goes with any.
const Tensor* operand_of(const Op& op, const Tensor& values) {
  return op.on_cuda() && values.device().type == DeviceType::kCPU ? nullptr : &values;
}

// An index expression with its offsets.
struct Plan {
  std::deque<TensorPtr> owned;  // made of masks
  Indices entries;              // one a dimension
  IndexLayout layout;
  TensorPtr offsets;             // int64, for every position of the broadcast index tensors
  StorageRef ids;                // 0, 1, … beside them, where the plan is numbered
  std::int64_t count = 0;        // of the positions
  std::int64_t offset_unit = 0;  // divides every offset
  std::int64_t largest = 0;      // offset

  std::int64_t* data() const { return offsets->data<std::int64_t>(); }
};

// Index tensors for the dimensions of masks come from `columns`; add(list, first) turns those from the first-th used
// dimension on into offsets.
template <class Add>
void fill_plan(const Op& op, Plan& plan, const Tensor& self, const Indices& indices, const MaskColumns& columns,
               Add&& add) {
  plan.entries = index_entries(self, indices, columns, plan.owned);
  plan.layout = index_layout(self, plan.entries, op);
  IndexList list = empty_list(op, plan.layout);
  plan.count = list.numel;
  plan.offsets = Tensor::empty(Dims{plan.count}, DType::kInt64, self.device());
  std::size_t first = 0;
  for (std::size_t i = 0; i < plan.layout.used.size(); ++i) {
    const std::size_t d = plan.layout.used[i];
    const std::int64_t size = self.sizes()[d], stride = self.strides()[d];
    if (list.count == kernels::kMaxIndices) {
      add(list, first);
      list.count = 0;
      first = i;
    }
    append(op, list, *plan.entries[d], plan.layout, size, stride);
    plan.offset_unit = std::gcd(plan.offset_unit, stride);
    plan.largest += std::max<std::int64_t>(size - 1, 0) * stride;
  }
  add(list, first);
}

Plan plan_on_cpu(const Op& op, const Tensor& self, const Indices& indices) {
  Plan plan;
  const auto columns = [&](const Tensor& mask, std::deque<TensorPtr>& owned) {
    for (const auto& column : kernels::cpu::nonzero(op, mask.sizes(), mask.dtype(), contiguous(mask)->raw())) {
      TensorPtr index = Tensor::empty(Dims{static_cast<std::int64_t>(column.size())}, DType::kInt64);
      std::copy(column.begin(), column.end(), index->data<std::int64_t>());
      owned.push_back(std::move(index));
    }
  };
  fill_plan(op, plan, self, indices, columns, [&](const IndexList& list, std::size_t first) {
    const auto fault = kernels::cpu::index_offsets(list, plan.data(), first != 0);
    if (!fault) return;
    const std::size_t d = plan.layout.used[first + static_cast<std::size_t>(fault->entry)];
    check(false, op, ": index ", fault->index, " is out of bounds for dimension ", d, " with size ", self.sizes()[d]);
  });
  return plan;
}

// One int64 tensor for each dimension of the mask. Waits for the count.
[[maybe_unused]] void mask_columns_on(const OnDevice& on, const Op& op, const Tensor& mask,
                                      std::deque<TensorPtr>& owned) {
  if (cuda::is_capturing(on.stream())) {
    throw_error(ErrorKind::kUnsupported, op,
                ": a mask among the indices makes the number of results depend on data, which a graph cannot hold; "
                "use torch.where, or run without a graph");
  }
  check(mask.dim() <= kMaxDims, op, ": a mask of ", mask.dim(), " dimensions has more than the kernels take (",
        kMaxDims, ")");
  const TensorPtr dense = contiguous(mask);
  const std::int64_t n = dense->numel(), one = 1;
  std::int64_t count = 0;
  StorageRef ranks;
  if (n != 0) {
    ranks = mask_ranks(on, *dense);
    read_back(on, op, static_cast<const std::int64_t*>(ranks->data()) + n - 1, &count, 1);
  }
  const TensorPtr columns = Tensor::empty(Dims{mask.dim(), count}, DType::kInt64, on.device());
  if (count != 0) {
    kernels::cuda::MaskShape shape{static_cast<int>(mask.dim()), {}};
    std::copy(mask.sizes().begin(), mask.sizes().end(), shape.sizes);
    on.launched(kernels::cuda::mask_columns(flags_of(*dense), static_cast<const std::int64_t*>(ranks->data()), n, shape,
                                            columns->data<std::int64_t>(), count, on.stream()));
  }
  for (std::int64_t d = 0; d < mask.dim(); ++d) {
    owned.push_back(columns->view(DimSpan(&count, 1), DimSpan(&one, 1), d * count));
  }
}

[[maybe_unused]] Plan plan_on(const OnDevice& on, const Op& op, const Tensor& self, const Indices& indices,
                              bool numbered, DeviceFault fault) {
  Plan plan;
  const auto columns = [&](const Tensor& mask, std::deque<TensorPtr>& owned) { mask_columns_on(on, op, mask, owned); };
  fill_plan(op, plan, self, indices, columns, [&](const IndexList& list, std::size_t first) {
    if (numbered && !plan.ids) {
      check_entries(plan.count, op);
      plan.ids = on.scratch(static_cast<std::size_t>(plan.count) * sizeof(std::uint32_t));
    }
    auto* const ids = numbered ? static_cast<std::uint32_t*>(plan.ids->data()) : nullptr;
    on.launched(kernels::cuda::index_offsets(list, plan.data(), first != 0, ids, on.faults(), fault, on.stream()));
  });
  return plan;
}

Strided<4> put_space(const Op& op, const Plan& plan, const Tensor& source) {
  const IndexLayout& layout = plan.layout;
  const Dims order = contiguous_strides(layout.shape);
  const auto value_strides = broadcast_strides(source, layout.shape, op, "values");
  return strided<4>(
      op, layout.shape,
      {DimSpan(order), DimSpan(layout.self_strides), DimSpan(layout.offset_strides), DimSpan(value_strides)});
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

[[maybe_unused]] void fill_where(const OnDevice& on, const Op& op, const Tensor& out, const Tensor& mask,
                                 std::int64_t dim, const Tensor& value) {
  Dims strides;
  strides.resize(out.sizes().size());
  for (std::int64_t d = 0; d < mask.dim(); ++d) strides[static_cast<std::size_t>(dim + d)] = mask.stride(d);
  const auto space = strided<2>(op, out.sizes(), {DimSpan(out.strides()), DimSpan(strides)});
  on.launched(kernels::cuda::masked_fill(space, out.raw(), flags_of(mask), value.raw(),
                                         static_cast<int>(element_size(out.dtype())), on.stream()));
}

// Entries sorted by where they go; every place is summed in the order of the values.
[[maybe_unused]] void accumulate_on(const OnDevice& on, const Op& op, const Plan& plan, const Tensor& out,
                                    const Tensor& source) {
  const IndexLayout& layout = plan.layout;
  const auto value_strides = broadcast_strides(source, layout.shape, op, "values");
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
  const auto slice = strided<3>(op, slice_shape, {DimSpan(slice_order), DimSpan(slice_out), DimSpan(slice_values)});
  const auto positions = strided<2>(op, layout.index_shape, {DimSpan(index_order), DimSpan(index_values)});
  const SortedSegments sorted = sort_segments(on, plan.offsets->storage(), plan.ids, plan.count, plan.largest);
  on.launched(kernels::cuda::reduce_segments(sorted.segments, slice, positions, out.raw(), source.raw(), out.dtype(),
                                             kernels::ReduceOp::kSum, true, on.stream()));
}

// The values in out's dtype, where the writes do not reach them; null when they are so already.
TensorPtr prepared_values(const Tensor& out, const Tensor& values) {
  if (values.dtype() != out.dtype()) return to_dtype(values, out.dtype());
  return values.storage().get() == out.storage().get() ? clone_contiguous(values) : nullptr;
}

// out[indices] = values, or += with `accumulate`. Everything but the indices' values was checked.
void put_on_cpu(const Op& op, const Tensor& out, const Indices& indices, const Tensor& values, bool accumulate) {
  const TensorPtr made = prepared_values(out, values);
  const Tensor& source = made ? *made : values;
  const Plan plan = plan_on_cpu(op, out, indices);
  const auto space = put_space(op, plan, source);
  accumulate ? kernels::cpu::index_add(space, out.dtype(), out.raw(), plan.data(), source.raw())
             : kernels::cpu::index_put(space, out.dtype(), out.raw(), plan.data(), source.raw());
}

[[maybe_unused]] void put_on(const OnDevice& on, const Op& op, const Tensor& out, const Indices& indices,
                             const Tensor& values, bool accumulate) {
  if (out.numel() == 0 && !has_mask(indices)) {
    // Nothing to write; an index into a dimension of size 0 is still an error, which the offsets report.
    plan_on(on, op, out, indices, false, DeviceFault::kIndexPut);
    return;
  }
  TensorPtr made;
  if (values.device().type == DeviceType::kCPU) {
    made = Tensor::empty(DimSpan{}, out.dtype(), on.device());
    fill_on_device(on, *made, *to_dtype(values, out.dtype()));
  } else {
    made = prepared_values(out, values);
  }
  const Tensor& source = made ? *made : values;
  std::int64_t dim = 0;
  if (const Tensor* const mask = only_mask(indices, dim); mask != nullptr && !accumulate && source.numel() == 1) {
    fill_where(on, op, out, *mask, dim, source);
    return;
  }
  const Plan plan = plan_on(on, op, out, indices, accumulate, DeviceFault::kIndexPut);
  const auto space = put_space(op, plan, source);
  if (plan.count == 0) return;
  if (accumulate) {
    accumulate_on(on, op, plan, out, source);
  } else {
    on.launched(kernels::cuda::index_put(space, out.raw(), plan.data(), source.raw(),
                                         static_cast<int>(element_size(out.dtype())), on.stream()));
  }
}

void index_put_out(const Op& op, AtenTensorHandle out, AtenTensorHandle self, const AtenTensorHandle* indices,
                   std::uint32_t num_indices, AtenTensorHandle values, bool accumulate) {
  const Tensor &to = op.input(out, "out"), &t = op.input(self, "self");
  const Tensor& source = values_input(op, values);
  check(to.sizes() == t.sizes() && to.dtype() == t.dtype(), op, ": 'out' is ", dtype_name(to.dtype()), " ",
        to_string(to.sizes()), ", expected ", dtype_name(t.dtype()), " ", to_string(t.sizes()), " as 'self'");
  Indices list;
  for (std::uint32_t i = 0; i < num_indices; ++i) list.push_back(index_input(op, indices[i], t));
  check_values(op, t, list, source, accumulate);
  const bool copies = to.numel() != 0 && (to.raw() != t.raw() || to.strides() != t.strides());
  TensorPtr kept;
  const auto start = [&] {
    if (!copies) return;
    if (source.storage().get() == to.storage().get()) kept = clone_contiguous(source);
    copy(to, t);
  };
  run(
      op, {&to, &t, operand_of(op, source)},
      [&] {
        if (copies) plan_on_cpu(op, t, list);  // an index out of range is refused before anything is written
        start();
        put_on_cpu(op, to, list, kept ? *kept : source, accumulate);
      },
      [&](const auto& on) {
        start();
        put_on(on, op, to, list, kept ? *kept : source, accumulate);
      });
}

}  // namespace

UNTORCH_OP_AS("index", index_Tensor,
              (AtenTensorHandle self, const AtenTensorHandle** indices, std::int64_t indices_len_,
               AtenTensorHandle* ret0),
              self, indices, indices_len_, ret0) {
  const Tensor& t = op.input(self, "self");
  const Indices list = optional_list(op, indices, indices_len_, t);
  check_width(op, t.dtype());
  check_expression(op, t, list);
  TensorPtr out;
  const auto prepare = [&](const IndexLayout& layout) {
    out = Tensor::empty_strided(layout.shape, elementwise_strides(layout.shape, layout.layouts), t.dtype(), t.device());
    return strided<3>(op, layout.shape,
                      {DimSpan(out->strides()), DimSpan(layout.self_strides), DimSpan(layout.offset_strides)});
  };
  run(
      op, {&t},
      [&] {
        const Plan plan = plan_on_cpu(op, t, list);
        const auto space = prepare(plan.layout);
        kernels::cpu::index_gather(space, t.dtype(), out->raw(), t.raw(), plan.data());
      },
      [&](const auto& on) {
        const Plan plan = plan_on(on, op, t, list, false, DeviceFault::kIndex);
        const auto space = prepare(plan.layout);
        return kernels::cuda::index_gather(space, out->raw(), t.raw(), plan.data(), plan.offset_unit,
                                           static_cast<int>(element_size(t.dtype())), on.stream());
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(index_put,
           (AtenTensorHandle self, const AtenTensorHandle** indices, std::int64_t indices_len_, AtenTensorHandle values,
            std::int32_t accumulate, AtenTensorHandle* ret0),
           self, indices, indices_len_, values, accumulate, ret0) {
  const Tensor& t = op.input(self, "self");
  const Indices list = optional_list(op, indices, indices_len_, t);
  const Tensor& source = values_input(op, values);
  check_values(op, t, list, source, accumulate != 0);
  TensorPtr out;
  run(
      op, {&t, operand_of(op, source)},
      [&] {
        out = clone_like(t);
        put_on_cpu(op, *out, list, source, accumulate != 0);
      },
      [&](const auto& on) {
        out = clone_like(t);
        put_on(on, op, *out, list, source, accumulate != 0);
      });
  give(ret0, std::move(out), op);
}

UNTORCH_SHIM aoti_torch_index_put_out(AtenTensorHandle out, AtenTensorHandle self, const AtenTensorHandle* indices,
                                      const std::uint32_t num_indices, const AtenTensorHandle values, bool accumulate) {
  return guarded("index_put", [&] {
    index_put_out(Op::of("index_put", out, "out"), out, self, indices, num_indices, values, accumulate);
  });
}
