// Grid-stride loops of elementwise kernels: one element a thread, a warp on 32 neighbours of the result.
//
//   element of the result, in memory order   0 1 2 … 255 | 256 … 511 | …
//   thread                                   0 1 2 … 255 |   0 … 255 | …   a CTA: 256 threads
//                                             CTA 0          CTA 1          grid-stride: then CTA 0 again
//
// Operands are addressed by strides (0: broadcast); dense ones are read and written in whole sectors.
#pragma once

#include "kernels/cuda/common/complex.cuh"
#include "kernels/elementwise.h"

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
int launch_unary(const Unary& p, Fn fn, Stream stream) {
  if (p.space.numel == 0) return 0;
  map_unary<Out, In><<<blocks_for(p.space.numel, kElementThreads), kElementThreads, 0, stream>>>(
      p.space, static_cast<Out*>(p.out), static_cast<const In*>(p.input), fn);
  return cudaGetLastError();
}

template <class Out, class In, class Fn>
int launch_binary(const Binary& p, Fn fn, Stream stream) {
  if (p.space.numel == 0) return 0;
  const auto value_of = [](Operand operand) {
    return operand.value == nullptr ? In{} : *static_cast<const In*>(operand.value);
  };
  map_binary<Out, In><<<blocks_for(p.space.numel, kElementThreads), kElementThreads, 0, stream>>>(
      p.space, static_cast<Out*>(p.out), static_cast<const In*>(p.a.data), value_of(p.a),
      static_cast<const In*>(p.b.data), value_of(p.b), fn);
  return cudaGetLastError();
}

// binary() by function (arithmetic.cu, power.cu, magnitude.cu).
int power(const Binary& p, Stream stream);
int gcd(const Binary& p, Stream stream);
int polar(const Binary& p, Stream stream);

}  // namespace untorch::kernels::cuda
