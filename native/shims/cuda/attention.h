// What the attention operators share: the contract of query, key and value, and the launch.
#pragma once

#include <cmath>

#include "kernels/cuda/attention/attention.h"
#include "shims/cuda/shim.h"

namespace untorch::shims::attention {

// Which dimensions of query, key and value are which; the width is the last. batch -1: sequences packed along the rows.
struct Axes {
  std::int64_t batch, head, row;
  const char* names;
};
inline constexpr Axes kHeadsFirst{0, 1, 2, "4-D (batch, heads, length, width)"};
inline constexpr Axes kRowsFirst{0, 2, 1, "4-D (batch, length, heads, width)"};
inline constexpr Axes kPacked{-1, 1, 0, "3-D (total length, heads, width)"};

// What an operator takes beyond what all of them take.
struct Accepts {
  bool float32 = false;      // besides float16 and bfloat16
  bool groups = true;        // fewer heads in key and value than in query
  bool value_width = false;  // another width in value
};

struct Operands {
  const Tensor &query, &key, &value;
  Axes axes;
  std::int64_t batch() const { return axes.batch < 0 ? 1 : query.size(axes.batch); }
  std::int64_t heads() const { return query.size(axes.head); }
  std::int64_t queries() const { return query.size(axes.row); }
  std::int64_t keys() const { return key.size(axes.row); }
  std::int64_t value_width() const { return value.size(-1); }
};

// The three handles, checked against each other.
Operands operands(const char* op, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, Axes axes,
                  Accepts accepts);
void check_inference(const char* op, double dropout_p, bool return_debug_mask);
// Room for a result that a model counts on finding with these strides. Kernels write rows in one piece: where the last
// dimension is not dense it is contiguous, and `in_layout` copies the result to its place.
TensorPtr empty_result(const Dims& sizes, const Dims& strides, const Tensor& query);
TensorPtr in_layout(TensorPtr out, const Dims& strides);
// A bias that broadcasts to [batch, heads, queries, keys], of the query's dtype.
void check_bias(const char* op, const Tensor* bias, const Operands& in);
// First rows of packed sequences, or lengths: 1-D int32 without gaps.
void check_lengths(const char* op, const char* argument, const Tensor* lengths, std::int64_t count);
void check_returns(const char* op, std::initializer_list<const void*> slots);

// The problem but for its pointers: sizes, dtype, scale.
kernels::cuda::Attention problem(const Operands& in, const double* scale);
// Fills in the operands and the result and launches. Operands that the kernels cannot read in place (their last stride
// is not 1, or they are not aligned to 16 bytes) are copied first.
void run(const OnDevice& on, const char* op, const Operands& in, const Tensor* bias, const Tensor& out,
         kernels::cuda::Attention problem);
// The random state of an operator without dropout: [2] and [] of uint64, one allocation. The kernel clears it.
struct RandomState {
  explicit RandomState(const OnDevice& on);
  TensorPtr state, unused;
};

}  // namespace untorch::shims::attention
