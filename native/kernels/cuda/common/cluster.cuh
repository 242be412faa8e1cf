// Thread block clusters, of sm_90 and newer: their barrier, and distributed shared memory (DSMEM).
#pragma once

namespace untorch::kernels::cuda {

__device__ __forceinline__ void wait_for_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The value at the same place of another CTA's shared memory (distributed shared memory).
__device__ __forceinline__ float at_rank(const float* own, int rank) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(own));
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}

}  // namespace untorch::kernels::cuda
