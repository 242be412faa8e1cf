// The elementwise half of an LSTM cell: an element of the state a thread. Bytes: eight gates, four biases (from the
// cache) and a cell read, four gates and two states written; five transcendental functions an element.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/rnn/lstm_cell.h"

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

int lstm_cell(DType dtype, const void* input_gates, const void* hidden_gates, const void* input_bias,
              const void* hidden_bias, const void* cell, void* new_hidden, void* new_cell, void* workspace,
              std::int64_t batch, std::int64_t hidden, Stream stream) {
  if (batch == 0 || hidden == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const auto in = [](const void* p) { return static_cast<const T*>(p); };
    const auto out = [](void* p) { return static_cast<T*>(p); };
    cell_step<<<blocks_for(batch * hidden, kThreads), kThreads, 0, stream>>>(
        in(input_gates), in(hidden_gates), in(input_bias), in(hidden_bias), in(cell), out(new_hidden), out(new_cell),
        out(workspace), batch, hidden);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
