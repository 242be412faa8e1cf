// mbarriers in shared memory (sm_90): initialisation, arrival, expected TMA bytes, wait for a phase.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// A phase ends with `count` arrivals; the first phase has parity 0.
__device__ __forceinline__ void mbarrier_init(std::uint32_t address, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t address) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address) : "memory");
}
// Makes initialised mbarriers visible to TMA, the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives, and adds `bytes` to what the phase expects of TMA loads.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t address, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has ended. UNTORCH_BOUNDED_WAITS, for tests: a deadlock traps.
#ifdef UNTORCH_BOUNDED_WAITS
__device__ __forceinline__ void mbarrier_wait(std::uint32_t address, int parity) {
  for (int attempt = 0; attempt < 2000000; ++attempt) {
    std::uint32_t done;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
    if (done) return;
  }
  asm volatile("trap;");
}
#else
__device__ __forceinline__ void mbarrier_wait(std::uint32_t address, int parity) {
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
#endif

}  // namespace untorch::kernels::cuda
