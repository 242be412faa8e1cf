// The two GEMMs of paged attention on pages of bfloat16, by AMX or vdpbf16ps. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/attention/attention_bf16.h"
#include "kernels/cpu/attention/paged_operands.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

#if defined(__AVX512F__)
// scores[row][0 … cols) of the keys [j, j + cols), cols rounded up to 16.
void score_pairs(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, bool amx, std::int64_t rows,
                 std::int64_t j, std::int64_t cols) {
  const std::int64_t padded = round_up(cols, P), width = round_up(p.width, kAmxPadding);
  auto* const keys = reinterpret_cast<std::uint32_t*>(w.keys);
  pack_page_keys(
      cols, p.width, [&](std::int64_t x) { return key_at<Bits>(p, item.sequence, item.kv_head, j + x); }, keys);
  multiply_pairs(amx, rows, padded / P, width / 2, width / 2, w.query16, width, keys, false, w.scores, kKeyBlock);
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const row = w.scores + r * kKeyBlock;
    for (std::int64_t x = 0; x < padded; x += N) store(row + x, load(row + x) * p.scale);
  }
}

// Weights times the values of the keys [j, j + cols) to the sums.
void add_value_pairs(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, bool amx,
                     std::int64_t rows, std::int64_t j, std::int64_t cols, std::int64_t ld) {
  const std::int64_t count = round_up(cols, kAmxPadding);
  auto* const values = reinterpret_cast<std::uint32_t*>(w.values);
  round_probabilities(rows, round_up(cols, P), count, w.scores, w.weights);
  pack_page_values(
      cols, p.width_v, [&](std::int64_t x) { return value_at<Bits>(p, item.sequence, item.kv_head, j + x); }, values);
  multiply_pairs(amx, rows, ld / P, count / 2, count / 2, w.weights, kKeyBlock, values, true, w.sums, ld);
}
#endif

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
