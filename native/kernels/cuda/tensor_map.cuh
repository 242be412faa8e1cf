// Copies of boxes of a matrix from global to shared memory.
#pragma once

#include "kernels/cuda/tensor_map.h"

namespace untorch::kernels::cuda {

// Ahead of the first box.
__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}
// The box from this column and row on; its bytes arrive at `barrier`.
__device__ __forceinline__ void copy_box(std::uint32_t to, const TensorMap& map, int column, int row,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

}  // namespace untorch::kernels::cuda
