// W4A8 linear layer on the CPU: weights of four bits in groups, activations quantized to int8 in parts of 32, sums in
// int32.
//
// Part j of a row of x becomes round(x · (1 / s)) with s = max|x| / 127. A weight of int4 is (q - 8)·scale + zero with
// q from 0 to 15, one of NVFP4 e2m1(q)·block scale·global scale, of which 2·e2m1(q) is an integer from -12 to 12. The
// products of a part, in NVFP4 of a block, are summed in integers, exactly; the parts in float32. A row with a value
// that is not finite gives NaN.
//
// AMX multiplies calls of many rows (kAmxFewestW4A8Rows) in bfloat16: x and the weights, without NVFP4's global scale,
// are rounded to it, and sums are float32.
#pragma once

#include <cstdint>

#include "kernels/cpu/w4a16/int4.h"

namespace untorch::kernels {

inline constexpr std::int64_t kW4A8Part = 32;     // neighbours of k in x with one scale
inline constexpr std::int64_t kW4A8Columns = 16;  // of a panel

enum class W4A8Format : std::uint8_t { kInt4, kNvfp4 };

struct W4A8Linear {
  W4A8Format format = W4A8Format::kInt4;
  std::int64_t m = 0, n = 0, k = 0;  // k is the weight's, a multiple of the group
  const float* x = nullptr;          // [m, x_width], rows x_stride apart
  std::int64_t x_width = 0;          // at most k: x is zero beyond it
  std::int64_t x_stride = 0;
  // [ceil(n/16)][k/8][16]: bytes of a word have k, k + 1, k + 2, k + 3 in their low halves and the next four in their
  // high halves.
  const std::int32_t* weight = nullptr;
  // int4: [ceil(n/16)][k/group][2][16], scale and zero, or [1][16] where all zeros are 0. NVFP4: float8_e4m3fn
  // [ceil(n/16)][k/16][16], of which 0x7f and 0xff, NaN, count as 480 and -480.
  const void* scales = nullptr;
  bool has_zeros = true;                       // of int4
  ScaleType scale_type = ScaleType::kFloat32;  // of int4
  std::int64_t group = 32;                     // 32, 64, 128 or 256; NVFP4: 16
  const float* global_scales = nullptr;        // [n], NVFP4 alone
  const float* bias = nullptr;                 // [n], may be null
  float* out = nullptr;                        // [m, n], dense
};

// out = x · weightᵀ + bias. A row's result depends neither on the number of threads nor on the other rows, but, with
// AMX, on whether there are many. Throws std::bad_alloc.
void w4a8_linear(const W4A8Linear& p);
// Several at once, which share the threads; none reads what another writes.
void w4a8_linears(const W4A8Linear* calls, std::int64_t count);

}  // namespace untorch::kernels
