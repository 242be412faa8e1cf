// Copies of boxes of a matrix from global to shared memory.
#pragma once

#include "kernels/cuda/sm90/tensor_map.h"

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
// How long the second-level cache keeps what is read: shorter than all else, or as it does without being told.
__device__ __forceinline__ std::uint64_t keep_shortly() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t keep_as_usual() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_box(std::uint32_t to, const TensorMap& map, int column, int row,
                                         std::uint32_t barrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

}  // namespace untorch::kernels::cuda
