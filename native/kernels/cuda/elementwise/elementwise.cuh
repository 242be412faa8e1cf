// The loops of elementwise kernels: an element a thread, neighbouring threads on neighbouring elements of the result.
#pragma once

#include "kernels/cuda/common/complex.cuh"
#include "kernels/cuda/elementwise/elementwise.h"

namespace untorch::kernels::cuda {

inline constexpr int kElementThreads = 256;

template <class Out, class In, class Fn>
__global__ void __launch_bounds__(kElementThreads) map_unary(Strided<2> space, Out* out, const In* in, Fn fn) {
  const std::int64_t step = std::int64_t{gridDim.x} * kElementThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kElementThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[2];
    offsets(space, i, at);
    store_narrow(out + at[0], fn(load_wide(in + at[1])));
  }
}

// An operand without data is its value.
template <class Out, class In, class Fn>
__global__ void __launch_bounds__(kElementThreads)
    map_binary(Strided<3> space, Out* out, const In* a, In a_value, const In* b, In b_value, Fn fn) {
  const std::int64_t step = std::int64_t{gridDim.x} * kElementThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kElementThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[3];
    offsets(space, i, at);
    const In x = a == nullptr ? a_value : a[at[1]], y = b == nullptr ? b_value : b[at[2]];
    store_narrow(out + at[0], fn(load_wide(&x), load_wide(&y)));
  }
}

template <class Out, class In, class Fn>
int launch_unary(const Strided<2>& space, void* out, const void* in, Fn fn, Stream stream) {
  if (space.numel == 0) return 0;
  map_unary<Out, In><<<blocks_for(space.numel, kElementThreads), kElementThreads, 0, stream>>>(
      space, static_cast<Out*>(out), static_cast<const In*>(in), fn);
  return cudaGetLastError();
}

template <class Out, class In, class Fn>
int launch_binary(const Strided<3>& space, void* out, Operand a, Operand b, Fn fn, Stream stream) {
  if (space.numel == 0) return 0;
  const auto value_of = [](Operand operand) {
    return operand.value == nullptr ? In{} : *static_cast<const In*>(operand.value);
  };
  map_binary<Out, In><<<blocks_for(space.numel, kElementThreads), kElementThreads, 0, stream>>>(
      space, static_cast<Out*>(out), static_cast<const In*>(a.data), value_of(a), static_cast<const In*>(b.data),
      value_of(b), fn);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
