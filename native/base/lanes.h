// Rows along one dimension of N strided operands: what sorts, scans and selections run over.
#pragma once

#include "base/strided.h"

namespace untorch {

// `rows.numel` rows. Row r of operand o starts at the element offset that `rows` gives; its elements are step[o] apart.
// `n` is the length of an input row; an operator's result may keep fewer elements of it.
template <int N>
struct Lanes {
  Strided<N> rows;
  std::int64_t n = 0;
  std::int64_t step[N] = {};
};

}  // namespace untorch
