// Warps and warpgroups: register reallocation (sm_90a), named barriers, warp-uniform values, stmatrix.
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
// bar.arrive: counts this warp's threads as having come, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Writes four 8 × 8 matrices of 2-byte elements, as accumulator fragments hold them: a lane's pair r[i] is of row lane
// / 4 and column 2 · (lane % 4) of matrix i. Lanes 8i to 8i + 7 have the row addresses of matrix i.
__device__ __forceinline__ void stmatrix_x4(std::uint32_t to, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
// Writes four transposed 8 × 8 matrices of 2-byte elements, as accumulator fragments hold them: a lane's pair r[i] is
// of column 2 · (lane % 4) and the next, row lane / 4, of matrix i, and becomes two rows. Lanes 8i to 8i + 7 have the
// row addresses of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(std::uint32_t to, const std::uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};\n" ::"r"(to), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace untorch::kernels::cuda
