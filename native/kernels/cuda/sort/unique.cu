// Distinct values of a sorted row: flags where a value differs from the one before, a scan of them (scan/mask.cu), and
// a scatter of each group's first element.
//
//   sorted   a a a b c c      flags 1 0 0 1 1 0      ranks 1 1 1 2 3 3      starts 0 3 4
//
// Counting integers: CTAs add up in shared memory where the bins fit, then in global memory; else in global memory.
//
// Roofline: memory-bound. Bytes: the values twice, 1 and 8 an element for flags and ranks, the results. The share has
// not been measured.
#include <algorithm>

#include "kernels/cuda/common/integers.cuh"
#include "kernels/unique.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;
// 32 KiB of counters of 64 bits.
constexpr int kSharedBins = 4096;

unsigned grid_for(std::int64_t n) { return std::min(blocks_for(n, kThreads), 65535u); }

template <class T>
__device__ __forceinline__ bool differs(T a, T b) {
  return widen(a) != widen(b);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    mark(const T* __restrict__ values, std::int64_t n, std::uint8_t* __restrict__ flags) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    flags[i] = i == 0 || differs(values[i], values[i - 1]) ? 1 : 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    write(const T* __restrict__ values, std::int64_t n, const std::int64_t* __restrict__ order,
          const std::uint8_t* __restrict__ flags, const std::int64_t* __restrict__ ranks, T* __restrict__ distinct,
          std::int64_t* __restrict__ inverse, std::int64_t* __restrict__ starts) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    const std::int64_t group = ranks[i] - 1;
    if (inverse != nullptr) inverse[order == nullptr ? i : order[i]] = group;
    if (flags[i] == 0) continue;
    distinct[group] = values[i];
    if (starts != nullptr) starts[group] = i;
  }
}

__global__ void __launch_bounds__(kThreads)
    count(const std::int64_t* __restrict__ starts, std::int64_t* __restrict__ counts, std::int64_t groups,
          std::int64_t n) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t g = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; g < groups; g += step) {
    counts[g] = (g + 1 < groups ? starts[g + 1] : n) - starts[g];
  }
}

__global__ void __launch_bounds__(kThreads)
    find_range(const void* values, DType dtype, std::int64_t n, std::int64_t stride, long long* range) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  // The lanes without an element repeat the first.
  long long largest = static_cast<long long>(load_integer(values, 0, dtype)), smallest = largest;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    const auto value = static_cast<long long>(load_integer(values, i * stride, dtype));
    largest = value > largest ? value : largest;
    smallest = value < smallest ? value : smallest;
  }
  for (int lane = 16; lane > 0; lane /= 2) {
    const long long a = __shfl_xor_sync(0xffffffff, largest, lane), b = __shfl_xor_sync(0xffffffff, smallest, lane);
    largest = a > largest ? a : largest;
    smallest = b < smallest ? b : smallest;
  }
  if (threadIdx.x % 32 != 0) return;
  atomicMax(range, largest);
  atomicMin(range + 1, smallest);
}

struct One {
  using Sum = unsigned long long;
  __device__ __forceinline__ Sum operator()(std::int64_t) const { return 1; }
};
template <class T>
struct Weight {
  using Sum = T;
  const T* weights;
  std::int64_t step;
  __device__ __forceinline__ T operator()(std::int64_t i) const { return weights[i * step]; }
};

template <class Add>
__global__ void __launch_bounds__(kThreads) add_up(const void* values, DType dtype, std::int64_t n, std::int64_t stride,
                                                   Add add, typename Add::Sum* out, std::int64_t bins) {
  __shared__ typename Add::Sum sums[kSharedBins];
  const bool shared = bins <= kSharedBins;
  if (shared) {
    for (int b = static_cast<int>(threadIdx.x); b < bins; b += kThreads) sums[b] = 0;
    __syncthreads();
  }
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += step) {
    atomicAdd((shared ? sums : out) + load_integer(values, i * stride, dtype), add(i));
  }
  if (!shared) return;
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < bins; b += kThreads) {
    if (sums[b] != 0) atomicAdd(out + b, sums[b]);
  }
}

}  // namespace

int mark_groups(const Groups& groups, std::uint8_t* flags, Stream stream) {
  if (groups.n == 0) return 0;
  return dispatch_real(groups.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    mark<T><<<grid_for(groups.n), kThreads, 0, stream>>>(static_cast<const T*>(groups.values), groups.n, flags);
    return cudaGetLastError();
  });
}

int write_groups(const Groups& groups, const std::uint8_t* flags, const std::int64_t* ranks, void* distinct,
                 std::int64_t* inverse, std::int64_t* starts, Stream stream) {
  if (groups.n == 0) return 0;
  return dispatch_real(groups.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    write<T><<<grid_for(groups.n), kThreads, 0, stream>>>(static_cast<const T*>(groups.values), groups.n, groups.order,
                                                          flags, ranks, static_cast<T*>(distinct), inverse, starts);
    return cudaGetLastError();
  });
}

int count_groups(const std::int64_t* starts, std::int64_t* counts, std::int64_t groups, std::int64_t n, Stream stream) {
  if (groups == 0) return 0;
  count<<<grid_for(groups), kThreads, 0, stream>>>(starts, counts, groups, n);
  return cudaGetLastError();
}

int integer_range(const void* values, DType dtype, std::int64_t n, std::int64_t step, std::int64_t* range,
                  Stream stream) {
  if (n == 0 || !is_integer(dtype)) return kNoKernel;
  find_range<<<std::min(grid_for(n), 1024u), kThreads, 0, stream>>>(values, dtype, n, step,
                                                                    reinterpret_cast<long long*>(range));
  return cudaGetLastError();
}

int bincount(const Bincount& p, Stream stream) {
  if (p.n == 0) return 0;
  const unsigned grid = std::min(grid_for(p.n), 1024u);
  if (p.weights == nullptr) {
    add_up<<<grid, kThreads, 0, stream>>>(p.values, p.dtype, p.n, p.step, One{},
                                          static_cast<unsigned long long*>(p.out), p.bins);
  } else if (p.weight_dtype == DType::kFloat32) {
    const Weight<float> weight{static_cast<const float*>(p.weights), p.weight_step};
    add_up<<<grid, kThreads, 0, stream>>>(p.values, p.dtype, p.n, p.step, weight, static_cast<float*>(p.out), p.bins);
  } else if (p.weight_dtype == DType::kFloat64) {
    const Weight<double> weight{static_cast<const double*>(p.weights), p.weight_step};
    add_up<<<grid, kThreads, 0, stream>>>(p.values, p.dtype, p.n, p.step, weight, static_cast<double*>(p.out), p.bins);
  } else {
    return kNoKernel;
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
