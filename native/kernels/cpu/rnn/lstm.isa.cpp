// LSTM gates: sigmoid and tanh through one exponential, written so that the compiler vectorises them in float.
//
// exp(x) = 2^n * p(r) with r = x - n*ln 2 in [-ln 2 / 2, ln 2 / 2] and the Taylor polynomial of degree 7 (its error
// there is 2e-9 relative, below float's rounding).
#include "kernels/cpu/rnn/lstm_levels.h"

#include <math.h>

namespace untorch::kernels::UNTORCH_ISA {
namespace {

inline float exp_of(float x) {
  // Beyond these the sigmoid is 0 or 1 in float already.
  x = x > 87.0f ? 87.0f : x;
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer lands in the low mantissa bits
  const float n = shifted - 12582912.0f;
  float r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  float p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
inline float sigmoid(float x) {
  const float y = 1.0f / (1.0f + exp_of(-x));
  return x != x ? x : y;
}
inline float tanh_of(float x) {
  // Near zero 1 - 2/(e^2x + 1) cancels: use the odd series there.
  const float e = exp_of(2.0f * x);
  const float far = 1.0f - 2.0f / (e + 1.0f);
  const float s = x * x;
  const float near = x + x * s * (-1.0f / 3.0f + s * (2.0f / 15.0f + s * (-17.0f / 315.0f + s * (62.0f / 2835.0f))));
  const float y = s < 0.04f ? near : far;
  return x != x ? x : y;
}
inline double sigmoid(double x) { return 1.0 / (1.0 + ::exp(-x)); }
inline double tanh_of(double x) { return ::tanh(x); }

}  // namespace

template <class T>
void lstm_cell(std::int64_t n, std::int64_t hidden, const T* gates, T* cell, T* hidden_out, std::int64_t out_stride) {
  for (std::int64_t row = 0; row < n; ++row) {
    const T* input = gates + row * 4 * hidden;
    const T *forget = input + hidden, *update = forget + hidden, *output = update + hidden;
    T* c = cell + row * hidden;
    T* h = hidden_out + row * out_stride;
#pragma omp simd
    for (std::int64_t i = 0; i < hidden; ++i) {
      const T next = sigmoid(forget[i]) * c[i] + sigmoid(input[i]) * tanh_of(update[i]);
      c[i] = next;
      h[i] = sigmoid(output[i]) * tanh_of(next);
    }
  }
}

template void lstm_cell(std::int64_t, std::int64_t, const float*, float*, float*, std::int64_t);
template void lstm_cell(std::int64_t, std::int64_t, const double*, double*, double*, std::int64_t);

}  // namespace untorch::kernels::UNTORCH_ISA
