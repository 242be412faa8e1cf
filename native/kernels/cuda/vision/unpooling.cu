// Max unpooling as a deterministic scatter in two passes: an atomic maximum records for every output element the last
// pixel that names it, then a gather writes the values. Fractional max pooling: one thread an output element.
//
// Layout: input [planes, pixels], output [planes, image], both row-major; one 8-byte winner an output element.
//
// Roofline: bytes = input and indices once, 16 of scratch an output element (written, read), the output once; no
// arithmetic: bound by DRAM, the first pass by atomics in L2. Its share has not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/index_split.cuh"
#include "kernels/unpooling.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    note_winners(std::int64_t count, std::int64_t pixels, std::int64_t image, const std::int64_t* __restrict__ indices,
                 unsigned long long* __restrict__ winners, FaultWord* faults) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const std::int64_t plane = i / pixels, at = indices[i];
    if (at < 0 || at >= image) {
      report(faults, DeviceFault::kMaxUnpool, at);
      continue;
    }
    atomicMax(winners + plane * image + at, static_cast<unsigned long long>(i) + 1);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_winners(std::int64_t count, const T* __restrict__ input, const unsigned long long* __restrict__ winners,
                   T* __restrict__ out) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) {
    const unsigned long long winner = winners[i];
    out[i] = winner == 0 ? T{} : input[winner - 1];
  }
}

// Where window `index` of one dimension starts: pseudo-random steps from one sample in [0, 1).
template <class C>
__device__ __forceinline__ std::int64_t start_of(C sample, std::int64_t index, std::int64_t input, std::int64_t output,
                                                 std::int64_t kernel) {
  if (index == output - 1) return input - kernel;
  const C alpha = static_cast<C>(input - kernel) / static_cast<C>(output - 1);
  return static_cast<std::int64_t>((static_cast<C>(index) + sample) * alpha) -
         static_cast<std::int64_t>(sample * alpha);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    fractional(const __grid_constant__ FractionalPool p, std::int64_t numel, bool narrow_index,
               const T* __restrict__ input, const T* __restrict__ samples, T* __restrict__ output,
               std::int64_t* __restrict__ indices) {
  using C = Compute<T>;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < numel; i += step) {
    std::int64_t rest = i, start[3];
    start[2] = split(rest, p.output[2], narrow_index);
    start[1] = split(rest, p.output[1], narrow_index);
    start[0] = split(rest, p.output[0], narrow_index);
    const std::int64_t c = split(rest, p.channels, narrow_index);
    const T* const sample = samples + rest * p.sample_batch + c * p.sample_channel;
#pragma unroll
    for (int d = 0; d < 3; ++d) {
      if (p.sample_slot[d] < 0) continue;
      start[d] =
          start_of<C>(widen(sample[p.sample_slot[d] * p.sample_at]), start[d], p.input[d], p.output[d], p.kernel[d]);
      // A sample outside of [0, 1) must not leave the input.
      start[d] = min(max(start[d], std::int64_t{0}), p.input[d] - p.kernel[d]);
    }
    const T* const from = input + rest * p.in_batch + c * p.in_channel;
    C best = -static_cast<C>(INFINITY);
    std::int64_t at = (start[0] * p.input[1] + start[1]) * p.input[2] + start[2];
    for (std::int64_t d = start[0]; d < start[0] + p.kernel[0]; ++d) {
      for (std::int64_t h = start[1]; h < start[1] + p.kernel[1]; ++h) {
        const T* const row = from + d * p.in_at[0] + h * p.in_at[1];
        for (std::int64_t w = start[2]; w < start[2] + p.kernel[2]; ++w) {
          const C value = widen(row[w * p.in_at[2]]);
          if (value > best || value != value) {
            best = value;
            at = (d * p.input[1] + h) * p.input[2] + w;
          }
        }
      }
    }
    output[i] = narrow<T>(best);
    indices[i] = at;
  }
}

}  // namespace

int max_unpool(const Unpool& p, unsigned long long* winners, FaultWord* faults, Stream stream) {
  const std::int64_t inputs = p.planes * p.pixels, outputs = p.planes * p.image;
  if (outputs == 0) return 0;
  if (inputs != 0) {
    note_winners<<<blocks_for(inputs, kThreads), kThreads, 0, stream>>>(inputs, p.pixels, p.image, p.indices, winners,
                                                                        faults);
    if (const int code = cudaGetLastError(); code != 0) return code;
  }
  return dispatch_bytes(p.element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    gather_winners<<<blocks_for(outputs, kThreads), kThreads, 0, stream>>>(outputs, static_cast<const T*>(p.input),
                                                                           winners, static_cast<T*>(p.out));
    return cudaGetLastError();
  });
}

int fractional_max_pool(const FractionalPool& p, DType dtype, const void* input, const void* samples, void* output,
                        std::int64_t* indices, Stream stream) {
  const std::int64_t numel = p.batch * p.channels * p.output[0] * p.output[1] * p.output[2];
  if (numel == 0) return 0;
  return dispatch_floating(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    fractional<T><<<blocks_for(numel, kThreads), kThreads, 0, stream>>>(
        p, numel, numel <= 0x7fffffff, static_cast<const T*>(input), static_cast<const T*>(samples),
        static_cast<T*>(output), indices);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
