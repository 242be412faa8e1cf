// The running softmax of attention, and tiles of its GEMMs. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
using I = vecmath::IntOf<V>::type;
constexpr int N = kLanes<float>;
constexpr std::int64_t P = kPanel<float>;
constexpr std::int64_t kKeyBlock = 128;  // keys whose scores stay in L1
constexpr float kNone = -__builtin_inff();

constexpr std::int64_t round_up(std::int64_t x, std::int64_t unit) { return (x + unit - 1) / unit * unit; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }

// exp for x <= 0. Below −87 it is 0: subnormal results would cost a hundred cycles each, and −inf is what masks are
// made of.
[[gnu::always_inline]] inline V exp_nonpositive(V x) {
  constexpr int kOne = 127 << 23;  // the exponent of 1.0
  const I gone = x < -87.0f;
  const auto e = vecmath::split_exp(vecmath::at_least(x, V{} - 87.0f));
  return (V)((I)(e.mantissa * (V)(e.exponent + kOne)) & ~gone);  // a product, which keeps NaN
}

[[gnu::always_inline]] inline V larger(V x, V y) { return vecmath::at_least(y, x); }

// The lanes of v rotated by half, a quarter …, combined by `fn` at every turn.
template <class W, class Fn>
[[gnu::always_inline]] inline float across(W v, Fn&& fn) {
  constexpr int kWidth = sizeof(W) / sizeof(float);
  if constexpr (kWidth == 16) {
    v = fn(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = fn(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = fn(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = fn(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  } else if constexpr (kWidth == 8) {
    v = fn(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = fn(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    v = fn(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
  } else {
    v = fn(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
    v = fn(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
  }
  return v[0];
}

// C [rows, 16·panels] from a tile description whose a, b and c are those of the first tile. C has room for whole
// panels.
void run_tiles(const Tile<float>& whole, std::int64_t rows, std::int64_t panels) {
  const std::int64_t pieces = (rows + kMaxRows - 1) / kMaxRows;
  const int tile_rows = static_cast<int>((rows + pieces - 1) / pieces);
  for (std::int64_t j = 0; j < panels;) {
    const int group = choose_panels(tile_rows, panels - j);
    for (std::int64_t i = 0; i < rows; i += tile_rows) {
      const auto count = static_cast<int>(smaller(tile_rows, rows - i));
      Tile<float> tile = whole;
      tile.a += i * whole.lda;
      tile.b += j * whole.panel_step;
      tile.c += i * whole.ldc + j * P;
      kMicro<float>.kernel[count - 1][group - 1](tile);
    }
    j += group;
  }
}

// Scores of one row, masked, become exp(score − maximum). Updates the row's maximum and sum; gives the factor for what
// was summed up before.
float soften(float* row, std::int64_t count, float& maximum, float& sum) {
  V top = V{} + kNone;
  for (std::int64_t j = 0; j < count; j += N) top = larger(load(row + j), top);
  const float highest = across(top, [](V x, V y) { return larger(x, y); });
  const float next = highest > maximum ? highest : maximum;
  if (next == kNone) {  // nothing seen yet; NaN scores have to stay
    V bad = V{};
    for (std::int64_t j = 0; j < count; j += N) {
      const V x = load(row + j);
      const V kept = x == x ? V{} : x;
      bad += kept;
      store(row + j, kept);
    }
    sum += across(bad, [](V x, V y) { return x + y; });
    return 1.0f;
  }
  V total = V{};
  for (std::int64_t j = 0; j < count; j += N) {
    const V e = exp_nonpositive(load(row + j) - next);
    total += e;
    store(row + j, e);
  }
  float factor = 0.0f;
  if (maximum == next) {
    factor = 1.0f;
  } else if (maximum != kNone) {
    factor = exp_nonpositive(V{} + (maximum - next))[0];
  } else if (sum != sum) {
    factor = 1.0f;  // NaN so far
  }
  sum = sum * factor + across(total, [](V x, V y) { return x + y; });
  maximum = next;
  return factor;
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
