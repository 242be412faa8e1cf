// Int4 W4A16 linear layers on the CPU, the weight in the layout of PyTorch's tensor-core kernels.
//
// The weight is int32 [n/8][k/(16·t)][32][t/2] with t, inner_k_tiles, 2, 4 or 8. The word [i][o][lane][j] holds column
// 8·i + lane/4, and in its nibbles p + 4·h (p < 4, h < 2, from the lowest) row 16·t·o + 32·j + 2·(lane % 4) + 8·p + h
// of the matrix [k, n] that x is multiplied by. A weight is (q - 8)·scale + zero.
#pragma once

#include <cstdint>

namespace untorch::kernels {

enum class ScaleType : int { kFloat32, kBFloat16, kFloat16 };

struct Int4Linear {
  std::int64_t m = 0, n = 0, k = 0;  // k is the weight's
  const float* x = nullptr;          // [m, x_width], rows x_stride apart
  std::int64_t x_width = 0;          // at most k: x is zero beyond it
  std::int64_t x_stride = 0;
  const std::int32_t* weight = nullptr;
  int inner_k_tiles = 8;
  const void* scales = nullptr;    // [k / group][n][2]: scale, zero
  std::int64_t scale_columns = 0;  // outputs that a row of scales has, where they are more than n; 0: n
  ScaleType scale_type = ScaleType::kFloat32;
  std::int64_t group = 32;      // 32, 64, 128 or 256; divides k
  const float* bias = nullptr;  // [n], may be null
  float* out = nullptr;         // [m, n], dense
};

// out = x · weightᵀ + bias, accumulated in float32 in an order that does not depend on the number of threads. Throws
// std::bad_alloc.
void int4_linear(const Int4Linear& p);

}  // namespace untorch::kernels
