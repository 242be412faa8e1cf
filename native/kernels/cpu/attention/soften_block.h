// The running softmax over a block of keys for a block of queries, with mask and causality. Included by *.isa.cpp files
// only.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention/softmax.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

void add_mask(float* scores, const float* mask, std::int64_t stride, std::int64_t count) {
  std::int64_t j = 0;
  if (stride == 1) {
    for (; j + N <= count; j += N) store(scores + j, load(scores + j) + load(mask + j));
  } else if (stride == 0) {
    for (; j + N <= count; j += N) store(scores + j, load(scores + j) + mask[0]);
  }
  for (; j < count; ++j) scores[j] += mask[j * stride];
}

// scores [rows, kKeyBlock], those of queries `first`… and keys `j`…j + cols, become exp(score − maximum) with zeros up
// to the next panel. The sums so far [rows, ldo] are scaled to the new maximum.
template <class Problem>
void soften_block(const Problem& p, const float* mask, std::int64_t first, std::int64_t rows, std::int64_t j,
                  std::int64_t cols, float* scores, float* sums, std::int64_t ldo, float* maximum, float* sum) {
  const std::int64_t padded = round_up(cols, P);
  for (std::int64_t i = 0; i < rows; ++i) {
    float* const row = scores + i * kKeyBlock;
    if (mask != nullptr) {
      add_mask(row, mask + (first + i) * p.mask.row_stride + j * p.mask.col_stride, p.mask.col_stride, cols);
    }
    std::int64_t seen = cols;
    if (p.causal && first + i + 1 < j + cols) seen = first + i + 1 > j ? first + i + 1 - j : 0;
    for (std::int64_t x = seen; x < padded; ++x) row[x] = kNone;
    const float factor = soften(row, padded, maximum[i], sum[i]);
    if (j > 0 && factor != 1.0f) {
      float* const o = sums + i * ldo;
      for (std::int64_t x = 0; x < ldo; x += N) store(o + x, load(o + x) * factor);
    }
  }
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
