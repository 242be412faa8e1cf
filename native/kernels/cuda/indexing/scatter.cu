// Scatter without a reduction, and the sort keys of one with a reduction. A thread an element, neighbours on
// neighbouring indices.
//
// Roofline: memory-bound; index and source read once, coalesced, one element written for each, where the index says.
#include "kernels/scatter.h"

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ std::int64_t load_index(const ScatterIndex& index, std::int64_t at) {
  return index.wide ? static_cast<const std::int64_t*>(index.data)[at]
                    : static_cast<const std::int32_t*>(index.data)[at];
}

// Unlike indexing, scattering does not wrap negative indices.
__device__ __forceinline__ bool in_range(std::int64_t value, std::int64_t size, FaultWord* word, DeviceFault fault) {
  if (value >= 0 && value < size) return true;
  report(word, fault, value);
  return false;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scatter_elements(Strided<3> space, ScatterIndex index, T* out, const T* source, T value, FaultWord* word) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[3];
    offsets(space, i, at);
    const std::int64_t target = load_index(index, at[0]);
    if (!in_range(target, index.size, word, DeviceFault::kScatter)) continue;
    out[at[1] + target * index.stride] = source == nullptr ? value : source[at[2]];
  }
}

__global__ void __launch_bounds__(kThreads) write_keys(Strided<3> space, ScatterIndex index, std::uint64_t* keys,
                                                       std::uint32_t* ids, FaultWord* word, DeviceFault fault) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < space.numel; i += step) {
    std::int64_t at[3];
    offsets(space, i, at);
    const std::int64_t target = load_index(index, at[2]);
    keys[i] = in_range(target, index.size, word, fault) ? static_cast<std::uint64_t>(at[1] + target * index.stride)
                                                        : ~std::uint64_t{0};
    ids[i] = static_cast<std::uint32_t>(i);
  }
}

}  // namespace

int scatter(const Strided<3>& space, const ScatterIndex& index, void* out, const void* source, const void* value,
            int element_bytes, FaultWord* word, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const T constant = source == nullptr ? *static_cast<const T*>(value) : T{};
    scatter_elements<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(
        space, index, static_cast<T*>(out), static_cast<const T*>(source), constant, word);
    return cudaGetLastError();
  });
}

int scatter_keys(const Strided<3>& space, const ScatterIndex& index, std::uint64_t* keys, std::uint32_t* ids,
                 FaultWord* word, DeviceFault fault, Stream stream) {
  if (space.numel == 0) return 0;
  write_keys<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(space, index, keys, ids, word, fault);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
