// What an advanced indexing expression (x[i, :, mask]) means: shapes, strides and layouts, without a look at the
// values.
#pragma once

#include <deque>
#include <functional>
#include <vector>

#include "tensor/tensor.h"

namespace untorch::shims {

struct IndexLayout {
  std::vector<std::int64_t> shape;                 // of the result
  std::vector<std::int64_t> self_strides;          // of the indexed tensor in that shape, 0 where an index decides
  std::vector<std::int64_t> offset_strides;        // of the offsets in that shape, 0 elsewhere
  std::vector<std::vector<std::int64_t>> layouts;  // strides that decide the layout of the result
  std::vector<std::int64_t> index_shape;           // that the index tensors were broadcast to
  std::size_t first_index_dim = 0;                 // where index_shape stands in `shape`
  std::vector<std::size_t> used;                   // the dimensions of the tensor that have an index
};

// `indices`: one entry a leading dimension, null where the dimension is taken whole (":"). Bool and uint8 entries are
// masks over as many dimensions as they have.
bool is_index_mask(const Tensor& t);
// Dtypes, shapes of masks and the number of indices.
void check_indices(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op);
// One entry a dimension of `self`, null: taken whole. Masks are replaced by what `columns` appends to `owned` for them:
// an index tensor for each of their dimensions. The indices were checked.
using MaskColumns = std::function<void(const Tensor& mask, std::deque<TensorPtr>& owned)>;
std::vector<const Tensor*> index_entries(const Tensor& self, const std::vector<const Tensor*>& indices,
                                         const MaskColumns& columns, std::deque<TensorPtr>& owned);
IndexLayout index_layout(const Tensor& self, const std::vector<const Tensor*>& entries, const char* op);

}  // namespace untorch::shims
