// Advanced indexing (x[i, :, mask]) prepared for a loop: offsets, shapes and strides.
#pragma once

#include <vector>

#include "shims/cpu/elementwise.h"

namespace untorch::shims {

// The positions of the non-zero elements of `t`, in row-major order: one int64 column a dimension.
std::vector<std::vector<std::int64_t>> nonzero_columns(const Tensor& t, const char* op);

// An indexing expression on one tensor. Every index was checked against its dimension.
struct Indexed {
  std::vector<std::int64_t> shape;                 // of the result
  std::vector<std::int64_t> self_strides;          // of the indexed tensor in that shape, 0 where an index decides
  std::vector<std::int64_t> offset_strides;        // of `offsets` in that shape, 0 elsewhere
  std::vector<std::int64_t> offsets;               // elements to add for every position of the broadcast index tensors
  std::vector<std::vector<std::int64_t>> layouts;  // strides that decide the layout of the result
};

// `indices`: one entry a leading dimension, null where the dimension is taken whole (":"). Bool and uint8 entries are
// masks over as many dimensions as they have. An index outside its dimension is an error.
Indexed prepare_index(const Tensor& self, const std::vector<const Tensor*>& indices, const char* op);

// out[indices] = values, or += with `accumulate`.
void index_put(const Tensor& out, const std::vector<const Tensor*>& indices, const Tensor& values, bool accumulate);

}  // namespace untorch::shims
