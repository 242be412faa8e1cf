// Masks: the rank of every set element (an inclusive scan, CUB's decoupled look-back, one pass), and what takes
// elements by rank: their coordinates, and masked_scatter. A thread an element.
//
// Roofline: memory-bound; the scan reads 1 and writes 8 bytes an element, the others read those 9, and read and write
// what the mask sets.
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_scan.cuh>

#include "kernels/compact.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/divide.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ std::int64_t first_index() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ __forceinline__ std::int64_t index_step() { return std::int64_t{gridDim.x} * kThreads; }

struct IsSet {
  __host__ __device__ std::int64_t operator()(std::uint8_t flag) const { return flag != 0 ? 1 : 0; }
};

__global__ void __launch_bounds__(kThreads)
    write_columns(const std::uint8_t* mask, const std::int64_t* ranks, std::int64_t n, MaskShape shape,
                  std::int64_t* columns, std::int64_t count) {
  for (std::int64_t i = first_index(); i < n; i += index_step()) {
    if (mask[i] == 0) continue;
    const std::int64_t rank = ranks[i] - 1;
    std::int64_t rest = i;
    for (int d = shape.ndim - 1; d >= 0; --d) {
      const std::int64_t quotient = divided(rest, shape.sizes[d], n);
      columns[d * count + rank] = rest - quotient * shape.sizes[d];
      rest = quotient;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scatter_masked(Strided<2> space, T* out, const std::uint8_t* mask, const std::int64_t* ranks, const T* source,
                   std::int64_t available, FaultWord* word) {
  for (std::int64_t i = first_index(); i < space.numel; i += index_step()) {
    std::int64_t at[2];
    offsets(space, i, at);
    if (mask[at[1]] == 0) continue;
    const std::int64_t rank = ranks[at[1]] - 1;
    if (rank < available)
      out[at[0]] = source[rank];
    else
      report(word, DeviceFault::kMaskedScatter, ranks[space.numel - 1]);
  }
}

}  // namespace

int inclusive_count(void* scratch, std::size_t& scratch_bytes, const std::uint8_t* flags, std::int64_t* ranks,
                    std::int64_t n, Stream stream) {
  return cub::DeviceScan::InclusiveSum(scratch, scratch_bytes, thrust::make_transform_iterator(flags, IsSet{}), ranks,
                                       n, stream);
}

int mask_columns(const std::uint8_t* mask, const std::int64_t* ranks, std::int64_t n, const MaskShape& shape,
                 std::int64_t* columns, std::int64_t count, Stream stream) {
  if (n == 0 || count == 0) return 0;
  write_columns<<<blocks_for(n, kThreads), kThreads, 0, stream>>>(mask, ranks, n, shape, columns, count);
  return cudaGetLastError();
}

int masked_scatter(const Strided<2>& space, void* out, const std::uint8_t* mask, const std::int64_t* ranks,
                   const void* source, std::int64_t available, int element_bytes, FaultWord* word, Stream stream) {
  if (space.numel == 0) return 0;
  return dispatch_bytes(element_bytes, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    scatter_masked<<<blocks_for(space.numel, kThreads), kThreads, 0, stream>>>(
        space, static_cast<T*>(out), mask, ranks, static_cast<const T*>(source), available, word);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
