// Advanced indexing: masks become positions, indices are broadcast, checked and turned into offsets.
#include "shims/indexing.h"

#include <algorithm>

#include "shims/view.h"

namespace untorch::shims {
namespace {

TensorPtr column_tensor(const std::vector<std::int64_t>& column) {
  const std::int64_t n = static_cast<std::int64_t>(column.size());
  TensorPtr out = Tensor::empty(DimSpan(&n, 1), DType::kInt64);
  std::copy(column.begin(), column.end(), out->data<std::int64_t>());
  return out;
}

}  // namespace

std::vector<std::vector<std::int64_t>> nonzero_columns(const Tensor& t, const char* op) {
  std::vector<std::vector<std::int64_t>> columns(static_cast<std::size_t>(t.dim()));
  const std::int64_t n = t.numel();
  if (n == 0) return columns;
  const TensorPtr flat = contiguous(t);
  std::vector<std::int64_t> index(columns.size(), 0);
  dispatch_number(op, t.dtype(), [&]<class T>() {
    const T* values = flat->data<T>();
    for (std::int64_t i = 0; i < n; ++i) {
      bool set;
      if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
        set = static_cast<float>(values[i]) != 0.0f;
      } else {
        set = values[i] != T(0);
      }
      if (set) {
        for (std::size_t d = 0; d < columns.size(); ++d) columns[d].push_back(index[d]);
      }
      for (std::size_t d = columns.size(); d-- > 0;) {
        if (++index[d] < t.sizes()[d]) break;
        index[d] = 0;
      }
    }
  });
  return columns;
}

bool is_index_mask(const Tensor& t) { return t.dtype() == DType::kBool || t.dtype() == DType::kUInt8; }

void check_indices(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op) {
  std::int64_t count = 0;
  bool any = false;
  for (const Tensor* index : indices) {
    any = any || index != nullptr;
    if (index == nullptr) {
      ++count;
    } else if (is_index_mask(*index)) {
      for (std::int64_t d = 0; d < index->dim(); ++d) {
        check(count + d < self.dim() && index->size(d) == self.size(count + d), op, ": the mask of shape ",
              to_string(index->sizes()), " at dimension ", count, " does not match the indexed tensor of shape ",
              to_string(self.sizes()));
      }
      check(index->dim() != 0, op, ": a 0-D mask is not supported; add a dimension to it and to the tensor");
      count += index->dim();
    } else {
      check(index->dtype() == DType::kInt64 || index->dtype() == DType::kInt32, op,
            ": tensors used as indices must be int64, int32, bool or uint8, got ", dtype_name(index->dtype()));
      ++count;
    }
  }
  check(count <= self.dim(), op, ": too many indices: ", count, " for a ", self.dim(), "-D tensor");
  check(any, op, ": at least one index tensor is needed");
}

std::vector<const Tensor*> index_entries(const Tensor& self, const std::vector<const Tensor*>& indices,
                                         const MaskColumns& columns, std::deque<TensorPtr>& owned) {
  std::vector<const Tensor*> out;
  for (const Tensor* index : indices) {
    if (index == nullptr || !is_index_mask(*index)) {
      out.push_back(index);
      continue;
    }
    const std::size_t before = owned.size();
    columns(*index, owned);
    for (std::size_t i = before; i < owned.size(); ++i) out.push_back(owned[i].get());
  }
  out.resize(static_cast<std::size_t>(self.dim()), nullptr);
  return out;
}

IndexLayout index_layout(const Tensor& self, const std::vector<const Tensor*>& entries, const char* op) {
  IndexLayout out;
  for (std::size_t d = 0; d < entries.size(); ++d) {
    if (entries[d] == nullptr) continue;
    out.index_shape = broadcast_shapes(out.index_shape, entries[d]->sizes(), op);
    out.used.push_back(d);
  }

  // The index dimensions stand where the first index stood when the indices are neighbours, else in front.
  const bool adjacent = out.used.back() - out.used.front() + 1 == out.used.size();
  std::vector<std::size_t> before, after;
  for (std::size_t d = 0; d < entries.size(); ++d) {
    if (entries[d] == nullptr) (adjacent && d < out.used.front() ? before : after).push_back(d);
  }
  auto append = [&](std::int64_t size, std::int64_t self_stride, std::int64_t offset_stride) {
    out.shape.push_back(size);
    out.self_strides.push_back(self_stride);
    out.offset_strides.push_back(offset_stride);
  };
  for (const std::size_t d : before) append(self.sizes()[d], self.strides()[d], 0);
  out.first_index_dim = before.size();
  const Dims index_strides = contiguous_strides(out.index_shape);
  for (std::size_t i = 0; i < out.index_shape.size(); ++i) append(out.index_shape[i], 0, index_strides[i]);
  for (const std::size_t d : after) append(self.sizes()[d], self.strides()[d], 0);

  out.layouts.push_back(out.self_strides);
  for (const std::size_t d : out.used) {
    const auto strides = broadcast_strides(*entries[d], out.index_shape, op, "indices");
    // For the layout PyTorch sees the index with a size of 1 in every other dimension, and what stride such a
    // dimension gets counts where the result has a size of 1 too.
    std::vector<std::int64_t> sizes(before.size(), 1);
    sizes.insert(sizes.end(), out.index_shape.begin(), out.index_shape.end());
    sizes.resize(out.shape.size(), 1);
    Dims seen;
    view_strides(Tensor({}, 0, DType::kInt64, out.index_shape, strides), sizes, seen);
    std::vector<std::int64_t> layout(out.shape.size(), 0);
    for (std::size_t i = 0; i < layout.size(); ++i) layout[i] = sizes[i] == out.shape[i] ? seen[i] : 0;
    out.layouts.push_back(std::move(layout));
  }
  return out;
}

Indexed prepare_index(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op) {
  check_indices(self, indices, op);
  std::deque<TensorPtr> owned;
  std::vector<const Tensor*> entries = index_entries(
      self, indices,
      [op](const Tensor& mask, std::deque<TensorPtr>& to) {
        for (const auto& column : nonzero_columns(mask, op)) to.push_back(column_tensor(column));
      },
      owned);
  for (const Tensor*& entry : entries) {
    if (entry == nullptr || entry->dtype() != DType::kInt32) continue;
    owned.push_back(to_dtype(*entry, DType::kInt64));
    entry = owned.back().get();
  }
  Indexed out{index_layout(self, entries, op), {}};
  out.offsets.assign(static_cast<std::size_t>(checked_numel(out.index_shape)), 0);
  const Dims index_strides = contiguous_strides(out.index_shape);
  for (const std::size_t d : out.used) {
    const Tensor& index = *entries[d];
    const std::int64_t size = self.sizes()[d], stride = self.strides()[d];
    const auto strides = broadcast_strides(index, out.index_shape, op, "indices");
    const auto* values = index.data<std::int64_t>();
    const kernels::StridedLoop<2> loop(out.index_shape, {DimSpan(index_strides), DimSpan(strides)}, true);
    const auto step = loop.inner();
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t value = values[at[1] + i * step[1]];
        check(value >= -size && value < size, op, ": index ", value, " is out of bounds for dimension ", d,
              " with size ", size);
        out.offsets[static_cast<std::size_t>(at[0] + i * step[0])] += (value < 0 ? value + size : value) * stride;
      }
    });
  }
  return out;
}

void index_put(const Tensor& out, const std::vector<const Tensor*>& indices, const Tensor& values, bool accumulate) {
  const char* op = "index_put";
  TensorPtr converted;
  if (values.dtype() != out.dtype()) {
    check(values.numel() == 1, op, ": 'values' is ", dtype_name(values.dtype()), ", expected ", dtype_name(out.dtype()),
          " as 'self'");
    converted = to_dtype(values, out.dtype());
  } else if (values.storage().get() == out.storage().get()) {
    converted = clone_contiguous(values);  // what is read may not change under the writes
  }
  const Tensor& source = converted ? *converted : values;
  const Indexed plan = prepare_index(out, indices, op);
  const auto value_strides = broadcast_strides(source, plan.shape, op, "values");
  // In order, so that the last of several values for one place stays and sums are the same everywhere.
  const kernels::StridedLoop<3> loop(
      plan.shape, {DimSpan(plan.self_strides), DimSpan(value_strides), DimSpan(plan.offset_strides)}, true);
  const auto step = loop.inner();
  const std::int64_t* offsets = plan.offsets.data();
  if (!accumulate) {
    dispatch_width(op, out.dtype(), [&]<class T>() {
      T* to = out.data<T>();
      const T* from = source.data<T>();
      loop.run_serial([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
        for (std::int64_t i = 0; i < n; ++i) {
          to[at[0] + i * step[0] + offsets[at[2] + i * step[2]]] = from[at[1] + i * step[1]];
        }
      });
    });
    return;
  }
  dispatch_number(op, out.dtype(), [&]<class T>() {
    T* to = out.data<T>();
    const T* from = source.data<T>();
    loop.run_serial([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        T& target = to[at[0] + i * step[0] + offsets[at[2] + i * step[2]]];
        const T value = from[at[1] + i * step[1]];
        if constexpr (std::is_same_v<T, bool>) {
          target = target || value;
        } else {
          target = static_cast<T>(target + value);
        }
      }
    });
  });
}

}  // namespace untorch::shims
