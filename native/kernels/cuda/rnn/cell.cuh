// The elementwise half of recurrent cells.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/recurrent_cell.h"

namespace untorch::kernels::cuda {

// By the GPU's own exponential and reciprocal, an instruction each, since each step waits for them: within 1e-6 of the
// exact value.
__device__ __forceinline__ float quick_exponential(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
  return y;
}
__device__ __forceinline__ float quick_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float quick_sigmoid(float x) { return quick_reciprocal(1.0f + quick_exponential(-x)); }
__device__ __forceinline__ float quick_tanh(float x) {
  const float square = x * x;
  // Near 0 the difference below would cancel.
  const float near = fmaf(x * square, fmaf(square, fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), x);
  const float far = fmaf(-2.0f, quick_reciprocal(1.0f + quick_exponential(2.0f * x)), 1.0f);
  return square < 0.04f ? near : far;
}

constexpr int kMostGates = 4;  // of a cell

struct CellState {
  float hidden, cell;
};

// The state behind one step. input, hidden: the shares of either in the gates of an element, with their biases.
__device__ __forceinline__ CellState next_state(RecurrentCell cell, const float (&input)[kMostGates],
                                                const float (&hidden)[kMostGates], CellState state) {
  switch (cell) {
    case RecurrentCell::kLstm: {
      const float in = quick_sigmoid(input[0] + hidden[0]), forget = quick_sigmoid(input[1] + hidden[1]);
      const float fresh = quick_tanh(input[2] + hidden[2]), out = quick_sigmoid(input[3] + hidden[3]);
      const float kept = forget * state.cell + in * fresh;
      return {out * quick_tanh(kept), kept};
    }
    case RecurrentCell::kGru: {
      const float reset = quick_sigmoid(input[0] + hidden[0]), update = quick_sigmoid(input[1] + hidden[1]);
      const float fresh = quick_tanh(input[2] + reset * hidden[2]);
      return {fresh + update * (state.hidden - fresh), 0.0f};
    }
    case RecurrentCell::kTanh:
      return {quick_tanh(input[0] + hidden[0]), 0.0f};
    default: {
      const float sum = input[0] + hidden[0];
      return {sum < 0.0f ? 0.0f : sum, 0.0f};  // NaN stays
    }
  }
}

}  // namespace untorch::kernels::cuda
