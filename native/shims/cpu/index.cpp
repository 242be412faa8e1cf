// index, index_put, nonzero, masked_select, masked_scatter and repeat_interleave (aoti_torch_cpu_* and older names).
#include <algorithm>

#include "shims/device_ops.h"
#include "shims/indexing.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

std::vector<const Tensor*> optional_list(const AtenTensorHandle** handles, std::int64_t length, const char* op) {
  std::vector<const Tensor*> out;
  for (std::int64_t i = 0; i < length; ++i) {
    const bool absent = handles[i] == nullptr || *handles[i] == nullptr || !unwrap(*handles[i])->defined();
    out.push_back(absent ? nullptr : &cpu_input(*handles[i], op, "indices"));
  }
  return out;
}

void nonzero_impl(AtenTensorHandle self, AtenTensorHandle* ret0) {
  const Tensor& t = cpu_input(self, "nonzero", "self");
  std::int64_t count = 0;
  std::vector<std::vector<std::int64_t>> columns;
  if (t.dim() == 0) {
    const std::int64_t one = 1;
    count = static_cast<std::int64_t>(
        nonzero_columns(*t.view({&one, 1}, {&one, 1}, t.storage_offset()), "nonzero")[0].size());
  } else {
    columns = nonzero_columns(t, "nonzero");
    count = static_cast<std::int64_t>(columns[0].size());
  }
  // PyTorch's layout: each dimension's positions lie together.
  const Dims shape{count, t.dim()}, strides{1, std::max<std::int64_t>(count, 1)};
  TensorPtr out =
      count == 0 ? Tensor::empty(shape, DType::kInt64) : Tensor::empty_strided(shape, strides, DType::kInt64);
  for (std::size_t d = 0; d < columns.size(); ++d) {
    std::copy(columns[d].begin(), columns[d].end(), out->data<std::int64_t>() + static_cast<std::int64_t>(d) * count);
  }
  give(ret0, std::move(out), "nonzero");
}

void repeat_interleave_impl(AtenTensorHandle repeats, const std::int64_t* output_size, AtenTensorHandle* ret0) {
  const char* op = "repeat_interleave";
  const Tensor& t = cpu_input(repeats, op, "repeats");
  check(t.dim() == 1, op, ": 'repeats' must be 1-D, got ", t.dim(), "-D");
  dispatch_index(op, t.dtype(), [&]<class T>() {
    const T* counts = t.data<T>();
    const std::int64_t n = t.size(0), step = t.stride(0);
    std::int64_t total = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      check(counts[i * step] >= 0, op, ": 'repeats' holds ", counts[i * step], " at ", i,
            ", expected no negative count");
      total += counts[i * step];
    }
    check(output_size == nullptr || *output_size == total, op, ": 'output_size' is ",
          output_size == nullptr ? 0 : *output_size, ", but the repeats sum to ", total);
    TensorPtr out = Tensor::empty(DimSpan(&total, 1), t.dtype());
    T* to = out->data<T>();
    for (std::int64_t i = 0; i < n; ++i) to = std::fill_n(to, counts[i * step], static_cast<T>(i));
    give(ret0, std::move(out), op);
  });
}

const Tensor& bool_mask(AtenTensorHandle mask, const char* op) {
  const Tensor& t = cpu_input(mask, op, "mask");
  check(t.dtype() == DType::kBool || (t.dtype() == DType::kUInt8 && std::string_view(op) == "masked_select"), op,
        ": 'mask' must be bool, got ", dtype_name(t.dtype()));
  return t;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_index_Tensor(AtenTensorHandle self, const AtenTensorHandle** indices,
                                         std::int64_t indices_len_, AtenTensorHandle* ret0) {
  return guarded("index", [&] {
    const Tensor& t = cpu_input(self, "index", "self");
    const Indexed plan = prepare_index(t, optional_list(indices, indices_len_, "index"), "index");
    TensorPtr out = Tensor::empty_strided(plan.shape, elementwise_strides(plan.shape, plan.layouts), t.dtype());
    const kernels::StridedLoop<3> loop(
        plan.shape, {DimSpan(out->strides()), DimSpan(plan.self_strides), DimSpan(plan.offset_strides)});
    const auto step = loop.inner();
    const std::int64_t* offsets = plan.offsets.data();
    dispatch_width("index", t.dtype(), [&]<class T>() {
      T* to = out->data<T>();
      const T* from = t.data<T>();
      loop.run([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
        if (step[0] == 1 && step[1] == 1 && step[2] == 0) {
          std::memcpy(to + at[0], from + at[1] + offsets[at[2]], static_cast<std::size_t>(n) * sizeof(T));
          return;
        }
        for (std::int64_t i = 0; i < n; ++i) {
          to[at[0] + i * step[0]] = from[at[1] + i * step[1] + offsets[at[2] + i * step[2]]];
        }
      });
    });
    give(ret0, std::move(out), "index");
  });
}

UNTORCH_SHIM aoti_torch_cpu_index_put(AtenTensorHandle self, const AtenTensorHandle** indices,
                                      std::int64_t indices_len_, AtenTensorHandle values, std::int32_t accumulate,
                                      AtenTensorHandle* ret0) {
  return guarded("index_put", [&] {
    const Tensor& t = cpu_input(self, "index_put", "self");
    TensorPtr out = clone_like(t);
    index_put(*out, optional_list(indices, indices_len_, "index_put"), cpu_input(values, "index_put", "values"),
              accumulate != 0);
    give(ret0, std::move(out), "index_put");
  });
}

UNTORCH_SHIM aoti_torch_index_put_out(AtenTensorHandle out, AtenTensorHandle self, const AtenTensorHandle* indices,
                                      const std::uint32_t num_indices, const AtenTensorHandle values, bool accumulate) {
  if (on_cuda(out) && cuda_ops.index_put_out != nullptr) {
    return cuda_ops.index_put_out(out, self, indices, num_indices, values, accumulate);
  }
  return guarded("index_put", [&] {
    const Tensor& to = cpu_input(out, "index_put", "out");
    const Tensor& t = cpu_input(self, "index_put", "self");
    const Tensor& source = cpu_input(values, "index_put", "values");
    check(to.sizes() == t.sizes() && to.dtype() == t.dtype(), "index_put: 'out' is ", dtype_name(to.dtype()), " ",
          to_string(to.sizes()), ", expected ", dtype_name(t.dtype()), " ", to_string(t.sizes()), " as 'self'");
    std::vector<const Tensor*> list;
    for (std::uint32_t i = 0; i < num_indices; ++i) {
      list.push_back(indices[i] == nullptr ? nullptr : &cpu_input(indices[i], "index_put", "indices"));
    }
    if (to.numel() != 0 && to.raw() != t.raw()) {
      prepare_index(t, list, "index_put");  // an index out of range is refused before anything is written
      const TensorPtr kept = source.storage().get() == to.storage().get() ? clone_contiguous(source) : nullptr;
      copy_cpu(to, t);
      index_put(to, list, kept ? *kept : source, accumulate);
      return;
    }
    index_put(to, list, source, accumulate);
  });
}

UNTORCH_SHIM aoti_torch_cpu_nonzero(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("nonzero", [&] { nonzero_impl(self, ret0); });
}

UNTORCH_SHIM aoti_torch_nonzero(AtenTensorHandle self, AtenTensorHandle* out) {
  return guarded("nonzero", [&] { nonzero_impl(self, out); });
}

UNTORCH_SHIM aoti_torch_cpu_nonzero_static(AtenTensorHandle self, std::int64_t size, std::int64_t fill_value,
                                           AtenTensorHandle* ret0) {
  return guarded("nonzero_static", [&] {
    const Tensor& t = cpu_input(self, "nonzero_static", "self");
    check(size >= 0, "nonzero_static: 'size' is ", size, ", expected 0 or more");
    const auto columns = nonzero_columns(t, "nonzero_static");
    TensorPtr out = Tensor::empty(Dims{size, t.dim()}, DType::kInt64);
    auto* to = out->data<std::int64_t>();
    for (std::int64_t i = 0; i < size; ++i) {
      for (const auto& column : columns) {
        *to++ = i < static_cast<std::int64_t>(column.size()) ? column[static_cast<std::size_t>(i)] : fill_value;
      }
    }
    give(ret0, std::move(out), "nonzero_static");
  });
}

UNTORCH_SHIM aoti_torch_cpu_masked_select(AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle* ret0) {
  return guarded("masked_select", [&] {
    const Tensor& t = cpu_input(self, "masked_select", "self");
    const Tensor& m = bool_mask(mask, "masked_select");
    const auto shape = broadcast_shapes(t.sizes(), m.sizes(), "masked_select");
    const TensorPtr values = clone_contiguous(expand(t, shape, "masked_select", "self"));
    const TensorPtr chosen = clone_contiguous(expand(m, shape, "masked_select", "mask"));
    const auto* flags = chosen->data<std::uint8_t>();
    const std::int64_t n = values->numel();
    const std::int64_t count = std::count_if(flags, flags + n, [](std::uint8_t flag) { return flag != 0; });
    TensorPtr out = Tensor::empty(DimSpan(&count, 1), t.dtype());
    dispatch_width("masked_select", t.dtype(), [&]<class T>() {
      T* to = out->data<T>();
      for (std::int64_t i = 0; i < n; ++i) {
        if (flags[i] != 0) *to++ = values->data<T>()[i];
      }
    });
    give(ret0, std::move(out), "masked_select");
  });
}

UNTORCH_SHIM aoti_torch_cpu_masked_scatter(AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle source,
                                           AtenTensorHandle* ret0) {
  return guarded("masked_scatter", [&] {
    const Tensor& t = cpu_input(self, "masked_scatter", "self");
    const Tensor& m = bool_mask(mask, "masked_scatter");
    const Tensor& src = cpu_input(source, "masked_scatter", "source");
    check(t.dtype() == src.dtype(), "masked_scatter: 'source' is ", dtype_name(src.dtype()), ", expected ",
          dtype_name(t.dtype()), " as 'self'");
    const auto shape = broadcast_shapes(t.sizes(), m.sizes(), "masked_scatter");
    const TensorPtr chosen = clone_contiguous(expand(m, shape, "masked_scatter", "mask"));
    const TensorPtr values = contiguous(src);
    const auto* flags = chosen->data<bool>();
    const std::int64_t n = chosen->numel(), available = values->numel();
    const std::int64_t needed = std::count(flags, flags + n, true);
    check(needed <= available, "masked_scatter: the mask sets ", needed, " elements, but 'source' has only ",
          available);
    const Tensor expanded = expand(t, shape, "masked_scatter", "self");
    TensorPtr out = clone_like(expanded);
    const Dims order = contiguous_strides(shape);
    const kernels::StridedLoop<2> loop(shape, {DimSpan(out->strides()), DimSpan(order)}, true);
    const auto step = loop.inner();
    dispatch_width("masked_scatter", t.dtype(), [&]<class T>() {
      T* to = out->data<T>();
      const T* from = values->data<T>();
      loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i) {
          if (flags[at[1] + i * step[1]]) to[at[0] + i * step[0]] = *from++;
        }
      });
    });
    give(ret0, std::move(out), "masked_scatter");
  });
}

UNTORCH_SHIM aoti_torch_cpu_repeat_interleave_Tensor(AtenTensorHandle repeats, std::int64_t* output_size,
                                                     AtenTensorHandle* ret0) {
  return guarded("repeat_interleave", [&] { repeat_interleave_impl(repeats, output_size, ret0); });
}

UNTORCH_SHIM aoti_torch_repeat_interleave_Tensor(AtenTensorHandle repeats, std::int64_t* output_size,
                                                 AtenTensorHandle* out) {
  return guarded("repeat_interleave", [&] { repeat_interleave_impl(repeats, output_size, out); });
}
