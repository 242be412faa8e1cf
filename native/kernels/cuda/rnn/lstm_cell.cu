// LSTM cell after its two GEMMs, elementwise: a thread per element of the state.
//
//   gates [batch, 4 * hidden]: input | forget | cell | output, each `hidden` wide, so a warp's four loads are coalesced
//
// Roofline: memory. Per element eight gates, four biases (from L2) and a cell are read, four gates and two states are
// written; five transcendental functions. Share of the roofline: not measured alone.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/rnn.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }
__device__ __forceinline__ float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ __forceinline__ double hyperbolic_tangent(double x) { return tanh(x); }
template <class C>
__device__ __forceinline__ C sigmoid(C x) {
  return C(1) / (C(1) + exponential(-x));
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    cell_step(const T* input_gates, const T* hidden_gates, const T* input_bias, const T* hidden_bias, const T* cell,
              T* new_hidden, T* new_cell, T* workspace, std::int64_t batch, std::int64_t hidden) {
  using C = Compute<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < batch * hidden; i += step) {
    const std::int64_t row = i / hidden, unit = i - row * hidden;
    C gate[4];
#pragma unroll
    for (int g = 0; g < 4; ++g) {
      const std::int64_t at = row * 4 * hidden + g * hidden + unit;
      gate[g] = widen<T>(input_gates[at]) + widen<T>(hidden_gates[at]);
      if (input_bias != nullptr) gate[g] += widen<T>(input_bias[g * hidden + unit]);
      if (hidden_bias != nullptr) gate[g] += widen<T>(hidden_bias[g * hidden + unit]);
      gate[g] = g == 2 ? hyperbolic_tangent(gate[g]) : sigmoid(gate[g]);
      workspace[at] = narrow<T>(gate[g]);
    }
    const C state = gate[1] * widen<T>(cell[i]) + gate[0] * gate[2];
    new_cell[i] = narrow<T>(state);
    new_hidden[i] = narrow<T>(gate[3] * hyperbolic_tangent(state));
  }
}

}  // namespace

int lstm_cell(const LstmCell& p, Stream stream) {
  if (p.batch == 0 || p.hidden == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto in = [](const void* x) { return static_cast<const T*>(x); };
    const auto out = [](void* x) { return static_cast<T*>(x); };
    cell_step<<<blocks_for(p.batch * p.hidden, kThreads), kThreads, 0, stream>>>(
        in(p.input_gates), in(p.hidden_gates), in(p.input_bias), in(p.hidden_bias), in(p.cell), out(p.new_hidden),
        out(p.new_cell), out(p.workspace), p.batch, p.hidden);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
