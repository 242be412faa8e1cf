// TMA loads of tiles from global to shared memory (cp.async.bulk.tensor), their L2 policies, and stores.
#pragma once

#include "kernels/cuda/sm90/tensor_map.h"

namespace untorch::kernels::cuda {

__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<std::uint64_t>(&map)) : "memory");
}
// Loads the map's box at this column and row; its bytes complete at the mbarrier.
__device__ __forceinline__ void tma_load_2d(std::uint32_t to, const TensorMap& map, int column, int row,
                                            std::uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(mbarrier)
      : "memory");
}
// The same for a map of four dimensions (TensorMap4dSpec).
__device__ __forceinline__ void tma_load_4d(std::uint32_t to, const TensorMap& map, int column, int row, int middle,
                                            int outer, std::uint32_t mbarrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(middle), "r"(outer), "r"(mbarrier)
      : "memory");
}
// L2 cache policies: evict what is read first, or as usual.
__device__ __forceinline__ std::uint64_t l2_evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ std::uint64_t l2_evict_normal() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void tma_load_2d(std::uint32_t to, const TensorMap& map, int column, int row,
                                            std::uint32_t mbarrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(mbarrier), "l"(policy)
      : "memory");
}
// Loads the box at this column and row of a three-dimensional map's matrix.
__device__ __forceinline__ void tma_load_3d(std::uint32_t to, const TensorMap& map, int column, int row, int matrix,
                                            std::uint32_t mbarrier, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<std::uint64_t>(&map)), "r"(column), "r"(row), "r"(matrix), "r"(mbarrier), "l"(policy)
      : "memory");
}

// TMA stores. Every thread that wrote to shared memory calls fence_before_tma_store; after a barrier one thread issues
// the stores and commits them as a group. Out-of-bounds elements are not written; a negative start coordinate is
// illegal.
__device__ __forceinline__ void fence_before_tma_store() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void tma_store_4d(std::uint32_t from, const TensorMap& map, int column, int row, int middle,
                                             int outer) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(
                   reinterpret_cast<std::uint64_t>(&map)),
               "r"(column), "r"(row), "r"(middle), "r"(outer), "r"(from)
               : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when the thread's stores have read shared memory: it may be written again, or the CTA may end.
__device__ __forceinline__ void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

}  // namespace untorch::kernels::cuda
