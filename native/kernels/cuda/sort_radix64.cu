// CUB's device-wide radix sort of pairs (key of 64 bits, position of 32). It is stable, and the same every time.
// No profiler ranges: they are for a tool that looks for its library in the environment.
#define CCCL_DISABLE_NVTX
#include <cub/device/device_radix_sort.cuh>

#include "kernels/cuda/sort_parts.h"

namespace untorch::kernels::cuda {

int radix_sort64(void* temp, std::size_t& bytes, std::uint64_t* const (&keys)[2], std::uint32_t* const (&order)[2],
                 int& current, int n, int end_bit, Stream stream) {
  cub::DoubleBuffer<std::uint64_t> key_buffers(keys[0], keys[1]);
  cub::DoubleBuffer<std::uint32_t> order_buffers(order[0], order[1]);
  const int code = cub::DeviceRadixSort::SortPairs(temp, bytes, key_buffers, order_buffers, n, 0, end_bit, stream);
  current = order_buffers.selector;
  return code;
}

}  // namespace untorch::kernels::cuda
