// The running count of a mask: 1 byte read and 8 written an element, one pass (CUB's decoupled look-back).
#include <thrust/iterator/transform_iterator.h>
#include <cub/device/device_scan.cuh>

#include "kernels/cuda/sort/radix_sort.h"

namespace untorch::kernels::cuda {
namespace {

struct IsSet {
  __host__ __device__ std::int64_t operator()(std::uint8_t flag) const { return flag != 0 ? 1 : 0; }
};

}  // namespace

int inclusive_count(void* scratch, std::size_t& scratch_bytes, const std::uint8_t* mask, std::int64_t* ranks,
                    std::int64_t n, Stream stream) {
  return cub::DeviceScan::InclusiveSum(scratch, scratch_bytes, thrust::make_transform_iterator(mask, IsSet{}), ranks, n,
                                       stream);
}

}  // namespace untorch::kernels::cuda
