// One step of a recurrent layer behind its GEMM, elementwise: a thread per element of the state.
//
// Roofline: memory. Per element two shares of each gate and two states are read, and two states and an output written.
#include "kernels/cuda/rnn/cell.cuh"
#include "kernels/rnn.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    update_states(RecurrentSteps p, RecurrentUpdate update, std::int64_t gates) {
  const std::int64_t hidden = p.hidden, width = p.directions * hidden, states = p.states();
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < states; i += stride) {
    const std::int64_t row = i / hidden, unit = i - row * hidden;  // rows of all directions
    const std::int64_t direction = row / p.batch, n = row - direction * p.batch;
    const std::int64_t t = direction == 0 ? update.step : p.steps - 1 - update.step;
    const std::int64_t place = (t * p.batch + n) * width + direction * hidden;
    CellState state{update.hidden_state[i], update.cell == nullptr ? 0.0f : update.cell[i]};
    const bool active = p.lengths == nullptr || t < p.lengths[n];
    if (active) {
      const auto* const from_input = static_cast<const T*>(p.input_gates) + place * gates + unit;
      const auto* const bias = static_cast<const T*>(p.bias_hidden);
      float x[kMostGates] = {}, y[kMostGates] = {};
#pragma unroll
      for (int g = 0; g < kMostGates; ++g) {
        if (g >= gates) break;
        x[g] = widen<T>(from_input[g * hidden]);
        y[g] = update.hidden_gates[(row * gates + g) * hidden + unit];
        if (bias != nullptr) y[g] += widen<T>(bias[(direction * gates + g) * hidden + unit]);
      }
      state = next_state(p.cell, x, y, state);
      update.hidden_state[i] = state.hidden;
      if (update.cell != nullptr) update.cell[i] = state.cell;
      if (update.operand != nullptr) static_cast<T*>(update.operand)[i] = narrow<T>(state.hidden);
    }
    static_cast<T*>(p.output)[place + unit] = narrow<T>(active ? state.hidden : 0.0f);
  }
}

}  // namespace

int recurrent_update(const RecurrentSteps& p, const RecurrentUpdate& update, Stream stream) {
  return dispatch_up_to_float32(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    update_states<T><<<blocks_for(p.states(), kThreads), kThreads, 0, stream>>>(p, update, gates_of(p.cell));
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
