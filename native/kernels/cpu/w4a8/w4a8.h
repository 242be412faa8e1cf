// W4A8 linear layer on the CPU: int4 weights in groups, activations quantized to int8 in parts of 32, sums in int32.
//
// Part j of a row of x becomes round(x · (1 / s)) with s = max|x| / 127. A weight is (q - 8)·scale + zero with q from 0
// to
// 15. The products of a part are summed in integers, exactly; the parts in float32. A row with a value that is not
// finite gives NaN.
#pragma once

#include <cstdint>

#include "kernels/cpu/w4a16/int4.h"

namespace untorch::kernels {

inline constexpr std::int64_t kW4A8Part = 32;     // neighbours of k in x with one scale
inline constexpr std::int64_t kW4A8Columns = 16;  // of a panel

struct W4A8Linear {
  std::int64_t m = 0, n = 0, k = 0;  // k is the weight's, a multiple of the group
  const float* x = nullptr;          // [m, x_width], rows x_stride apart
  std::int64_t x_width = 0;          // at most k: x is zero beyond it
  std::int64_t x_stride = 0;
  // [ceil(n/16)][k/8][16]: bytes of a word have k, k + 1, k + 2, k + 3 in their low halves and the next four in their
  // high halves.
  const std::int32_t* weight = nullptr;
  const void* scales = nullptr;  // [ceil(n/16)][k/group][2][16]: scale, zero
  ScaleType scale_type = ScaleType::kFloat32;
  std::int64_t group = 32;      // 32, 64, 128 or 256
  const float* bias = nullptr;  // [n], may be null
  float* out = nullptr;         // [m, n], dense
};

// out = x · weightᵀ + bias. A row's result depends neither on the number of threads nor on the other rows. Throws
// std::bad_alloc.
void w4a8_linear(const W4A8Linear& p);
// Several at once, which share the threads; none reads what another writes.
void w4a8_linears(const W4A8Linear* calls, std::int64_t count);

}  // namespace untorch::kernels
