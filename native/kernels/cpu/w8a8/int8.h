// W8A8 linear layer on the CPU: int8 weights with a scale an output, activations quantized to uint8 with a scale and a
// zero point a row, sums in int32.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels {

enum class ActivationType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// How a row of activations becomes u = clamp(round(x / scale) + zero, 0, 255). The row's range holds 0.
enum class ActivationRange : int {
  kAsymmetric = 0,  // scale (max - min) / 255, zero -min / scale
  kSymmetric = 1,   // scale max|x| / 127, zero 128
  kStatic = 2,      // scale and zero are given
  kTensor = 3,      // as kAsymmetric, of all rows together, as PyTorch's choose_qparams rounds it
};

// Four neighbours of k lie in one 32-bit lane, as vpdpbusd multiplies them.
inline constexpr std::int64_t kInt8Group = 4;
// The largest k whose sums fit int32: 255 · 128 · k < 2^31.
inline constexpr std::int64_t kInt8MaxK = 65536;

// out [m, n] = activation(x · (scale · weight)ᵀ + bias) + residual. A row with a value that is not finite gives NaN,
// with kTensor all rows; with kStatic only NaN does, and infinities saturate.
//
// With `groups` above 1 the weight has a scale for each k / groups neighbours of k: their sums are exact, and those of
// the groups are added in float32, in order. Activations have one scale a row all the same.
struct Int8Linear {
  std::int64_t m, n, k;
  const void* x;  // [m, k], rows x_stride elements apart
  std::int64_t x_stride;
  ActivationType type;  // of x, bias, residual and out
  ActivationRange range;
  float input_scale;                // kStatic: above 0; kTensor: the least scale, above 0
  std::int32_t input_zero;          // kStatic: 0 to 255
  const std::int8_t* weight;        // [ceil(n/16)][ceil(k/4)][16][4], zeros behind n and k
  const float* scale;               // [groups][ceil(n/16) · 16]
  const std::int32_t* column_sums;  // [groups][ceil(n/16) · 16], the sums of the weights along k
  const void* bias;                 // [n], or null
  Epilogue epilogue;
  const void* residual;  // [m, n], rows ldr elements apart, or null
  std::int64_t ldr;
  void* out;                // [m, n], dense
  std::int64_t groups = 1;  // k is a multiple of 4 · groups where they are more than one
};

// k at most kInt8MaxK. Throws std::bad_alloc. The result does not depend on the number of threads; the quantized
// activations and the sums do not depend on the CPU.
void int8_linear(const Int8Linear& p);

}  // namespace untorch::kernels
