// Advanced indexing expressions: indices are checked and broadcast, and the result's layout follows.
#include "shims/indexing.h"

#include "shims/broadcast.h"
#include "shims/view.h"

namespace untorch::shims {

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

}  // namespace untorch::shims
