// Warps and warpgroups: register reallocation (sm_90a), named barriers, warp-uniform values.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// Tells the compiler that the value is warp-uniform: what follows from it goes to uniform registers.
__device__ __forceinline__ int warp_uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

// Register reallocation; every warp of the warpgroup calls it.
template <int Count>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// bar.sync: returns when `threads` threads, whole warps, have come to this barrier (1 to 15; __syncthreads has 0).
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace untorch::kernels::cuda
