// The contract of query, key and value, on every device.
#pragma once

#include "shims/op.h"

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
  DType widest = DType::kFloat16;  // kFloat32 and kFloat64: also these, besides float16 and bfloat16
  bool groups = true;              // fewer heads in key and value than in query
  bool value_width = false;        // another width in value
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

// The three handles, checked against each other; on CUDA also against the kernels' limits.
Operands operands(const Op& op, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, Axes axes,
                  Accepts accepts);
void check_inference(const Op& op, double dropout_p, bool return_debug_mask);
// A bias that broadcasts to [batch, heads, queries, keys], of the query's dtype.
void check_bias(const Op& op, const Tensor* bias, const Operands& in);
// Cumulative or plain sequence lengths: 1-D int32 without gaps.
void check_lengths(const Op& op, const char* argument, const Tensor* lengths, std::int64_t count);
void check_returns(const Op& op, std::initializer_list<const void*> slots);
// The scale that is given, or 1 / sqrt(width).
double scale_or_default(const double* scale, std::int64_t width);

}  // namespace untorch::shims::attention
