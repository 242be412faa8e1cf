// Exponential race. With replacement: a CTA a draw, whose threads keep the best of their categories, then an arg-max in
// shared memory. Without: a CTA a row writes the speeds, which a selection orders (sort/radix_select.cu).
//
//   thread t of CTA c: subsequence c · 256 + t of Philox, a draw of four uniforms for categories t, t + 256, …
//
// Roofline: ten Philox rounds and one logarithm for every four and one categories: bound by arithmetic for the half
// types, by memory otherwise. Its share has not been measured.
#include <algorithm>

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/random/philox.cuh"
#include "kernels/multinomial.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = kRaceThreads;

template <class C>
__device__ __forceinline__ C speed_of(C weight, C uniform) {
  // The draw may be 1, whose logarithm is 0: half a step below it stands for it.
  constexpr C kHalfStep = sizeof(C) == 8 ? C(1.1102230246251565e-16) : C(5.9604645e-08);
  const C time = uniform >= C(1) - kHalfStep ? kHalfStep : -log(uniform);
  return weight > C(0) ? weight / time : C(-1);
}

// body(category, speed) for the categories of this thread.
template <class T, class Body>
__device__ __forceinline__ void race(const T* __restrict__ weights, std::int64_t categories, Philox& philox,
                                     FaultWord* faults, Body&& body) {
  using C = Compute<T>;
  constexpr int kCount = Draw<C>::kCount;
  for (std::int64_t base = threadIdx.x; base < categories; base += kThreads * kCount) {
    const Draw<C> draw = uniform_draw<C>(philox.next());
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const std::int64_t j = base + i * kThreads;
      if (j >= categories) break;
      const C weight = widen(weights[j]);
      if (!(weight >= C(0)) || isinf(weight)) report(faults, DeviceFault::kMultinomial, 0);
      body(j, speed_of(weight, draw.value[i]));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    find_winners(Race p, std::int64_t samples, std::int64_t draws, std::int64_t* __restrict__ out, PhiloxState state,
                 FaultWord* faults) {
  using C = Compute<T>;
  __shared__ C speeds[kThreads];
  __shared__ std::int64_t winners[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  Philox philox(state, std::uint64_t{blockIdx.x} * kThreads + threadIdx.x);
  for (std::int64_t draw = blockIdx.x; draw < draws; draw += gridDim.x) {
    const std::int64_t row = draw / samples;
    C best = C(-2);
    std::int64_t winner = 0;
    race(static_cast<const T*>(p.weights) + row * p.categories, p.categories, philox, faults,
         [&](std::int64_t j, C speed) {
           if (speed > best) {
             best = speed;
             winner = j;
           }
         });
    speeds[thread] = best;
    winners[thread] = winner;
    __syncthreads();
    for (int half = kThreads / 2; half > 0; half /= 2) {
      if (thread < half && speeds[thread + half] > speeds[thread]) {
        speeds[thread] = speeds[thread + half];
        winners[thread] = winners[thread + half];
      }
      __syncthreads();
    }
    if (thread == 0) {
      if (!(speeds[0] > C(0))) report(faults, DeviceFault::kMultinomialSum, row);
      out[draw] = winners[0];
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    write_speeds(Race p, Compute<T>* __restrict__ speeds, PhiloxState state, FaultWord* faults) {
  Philox philox(state, std::uint64_t{blockIdx.x} * kThreads + threadIdx.x);
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    Compute<T>* const to = speeds + row * p.categories;
    race(static_cast<const T*>(p.weights) + row * p.categories, p.categories, philox, faults,
         [&](std::int64_t j, Compute<T> speed) { to[j] = speed; });
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads)
    check_last(const C* __restrict__ speeds, std::int64_t rows, std::int64_t step, FaultWord* faults) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += stride) {
    if (!(speeds[row * step] > C(0))) report(faults, DeviceFault::kMultinomialSum, row);
  }
}

}  // namespace

RaceGrid race_grid(const Race& race, std::int64_t samples) {
  constexpr std::int64_t kMost = 65535;
  const std::int64_t draws = race.rows * samples, ctas = std::min(draws, kMost);
  if (draws == 0 || race.categories == 0) return {};
  const int per_draw = race.dtype == DType::kFloat64 ? 2 : 4;
  const std::int64_t block = std::int64_t{kThreads} * per_draw;
  const std::int64_t rounds = (race.categories + block - 1) / block * ((draws + ctas - 1) / ctas);
  return {static_cast<unsigned>(ctas), static_cast<std::uint64_t>(rounds) * 4};
}

int race_winners(const Race& race, std::int64_t samples, std::int64_t* out, PhiloxState state, FaultWord* faults,
                 Stream stream) {
  const RaceGrid grid = race_grid(race, samples);
  if (grid.ctas == 0) return 0;
  return dispatch_floating(race.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    find_winners<T><<<grid.ctas, kThreads, 0, stream>>>(race, samples, race.rows * samples, out, state, faults);
    return cudaGetLastError();
  });
}

int race_speeds(const Race& race, void* speeds, PhiloxState state, FaultWord* faults, Stream stream) {
  const RaceGrid grid = race_grid(race, 1);
  if (grid.ctas == 0) return 0;
  return dispatch_floating(race.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    write_speeds<T><<<grid.ctas, kThreads, 0, stream>>>(race, static_cast<Compute<T>*>(speeds), state, faults);
    return cudaGetLastError();
  });
}

int check_race(const void* speeds, bool wide, std::int64_t rows, std::int64_t step, FaultWord* faults, Stream stream) {
  if (rows == 0) return 0;
  const unsigned grid = std::min(blocks_for(rows, kThreads), 1024u);
  if (wide) {
    check_last<<<grid, kThreads, 0, stream>>>(static_cast<const double*>(speeds), rows, step, faults);
  } else {
    check_last<<<grid, kThreads, 0, stream>>>(static_cast<const float*>(speeds), rows, step, faults);
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
