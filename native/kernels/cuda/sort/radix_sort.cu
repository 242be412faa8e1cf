// CUB's device-wide radix sort of 64-bit keys with 32-bit values. The keys are element offsets, so callers pass only
// the bits that a tensor of that size needs.
//
// Roofline: memory-bound; 12 bytes read and 12 written a pair for every 8 bits of the key (CUB picks the digit).
#include "kernels/cuda/sort/radix_sort.h"

#include <cub/device/device_radix_sort.cuh>

namespace untorch::kernels::cuda {

int radix_sort_pairs(void* scratch, std::size_t& scratch_bytes, const std::uint64_t* keys, std::uint64_t* sorted_keys,
                     const std::uint32_t* values, std::uint32_t* sorted_values, std::int64_t n, int bits,
                     Stream stream) {
  return cub::DeviceRadixSort::SortPairs(scratch, scratch_bytes, keys, sorted_keys, values, sorted_values, n, 0, bits,
                                         stream);
}

}  // namespace untorch::kernels::cuda
