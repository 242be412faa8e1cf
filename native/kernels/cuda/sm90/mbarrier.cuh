// Barriers in shared memory for which a part of a block waits while another part works on.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// A phase of the barrier at `address` ends with `count` arrivals; the first phase has parity 0.
__device__ __forceinline__ void make_barrier(std::uint32_t address, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive_at(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
// Makes new barriers known to copies by boxes.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and has the phase wait for so many bytes besides.
__device__ __forceinline__ void expect_bytes(std::uint32_t address, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has ended.
__device__ __forceinline__ void wait_at(std::uint32_t address, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(address),
      "r"(parity)
      : "memory");
}

}  // namespace untorch::kernels::cuda
