// Advanced indexing (x[i, :, mask]) prepared for a loop: offsets, shapes and strides.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "shims/cpu/elementwise.h"

namespace untorch::shims {

// The positions of the non-zero elements of `t`, in row-major order: one int64 column a dimension.
std::vector<std::vector<std::int64_t>> nonzero_columns(const Tensor& t, const char* op);

// What an indexing expression on one tensor means, without a look at the values.
struct IndexLayout {
  std::vector<std::int64_t> shape;                 // of the result
  std::vector<std::int64_t> self_strides;          // of the indexed tensor in that shape, 0 where an index decides
  std::vector<std::int64_t> offset_strides;        // of the offsets in that shape, 0 elsewhere
  std::vector<std::vector<std::int64_t>> layouts;  // strides that decide the layout of the result
  std::vector<std::int64_t> index_shape;           // that the index tensors were broadcast to
  std::size_t first_index_dim = 0;                 // where index_shape stands in `shape`
  std::vector<std::size_t> used;                   // the dimensions of the tensor that have an index
};

// The same with the values. Every index was checked against its dimension.
struct Indexed : IndexLayout {
  std::vector<std::int64_t> offsets;  // elements to add for every position of the broadcast index tensors
};

bool is_index_mask(const Tensor& t);
// Dtypes, shapes of masks and the number of indices. Looks at no values, on any device.
void check_indices(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op);
// One entry a dimension of `self`, null: taken whole. Masks are replaced by what `columns` appends to `owned` for them:
// an index tensor for each of their dimensions. The indices were checked.
using MaskColumns = std::function<void(const Tensor& mask, std::deque<TensorPtr>& owned)>;
std::vector<const Tensor*> index_entries(const Tensor& self, const std::vector<const Tensor*>& indices,
                                         const MaskColumns& columns, std::deque<TensorPtr>& owned);
IndexLayout index_layout(const Tensor& self, const std::vector<const Tensor*>& entries, const char* op);

// `indices`: one entry a leading dimension, null where the dimension is taken whole (":"). Bool and uint8 entries are
// masks over as many dimensions as they have. An index outside its dimension is an error.
Indexed prepare_index(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op);

// out[indices] = values, or += with `accumulate`.
void index_put(const Tensor& out, const std::vector<const Tensor*>& indices, const Tensor& values, bool accumulate);

}  // namespace untorch::shims
