// What the kernels that quantise weights share. Included by *.isa.cpp files only.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/elements.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
using I = vecmath::IntOf<V>::type;
constexpr int N = kLanes<float>;

[[gnu::always_inline]] inline V smaller(V a, V b) { return a < b ? a : b; }
[[gnu::always_inline]] inline V larger(V a, V b) { return a > b ? a : b; }

// To nearest even, below 2^22.
[[gnu::always_inline]] inline V rounded(V x) {
  constexpr float kRound = 0x1.8p23f;
  return (x + kRound) - kRound;
}

[[gnu::always_inline]] inline float sum_of(V v) {
  float total = 0.0f;
  for (int i = 0; i < N; ++i) total += v[i];
  return total;
}
[[gnu::always_inline]] inline float largest_of(V v) {
  float most = v[0];
  for (int i = 1; i < N; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
[[gnu::always_inline]] inline float smallest_of(V v) { return -largest_of(-v); }

// The least and the largest of `count` values, one at least.
inline void find_range(const float* w, std::int64_t count, float& low, float& high) {
  low = w[0], high = w[0];
  std::int64_t j = 0;
  if (count >= N) {
    V lows = load(w), highs = lows;
    for (j = N; j + N <= count; j += N) lows = smaller(load(w + j), lows), highs = larger(load(w + j), highs);
    low = smallest_of(lows), high = largest_of(highs);
  }
  for (; j < count; ++j) low = w[j] < low ? w[j] : low, high = w[j] > high ? w[j] : high;
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
