// Loads of 16 and 8 bytes that leave L1 alone.
#pragma once

namespace untorch::kernels::cuda {

// For what is read once, such as weights, keys and values: it must not push what is read again out of L1.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(address));
  return value;
}
__device__ __forceinline__ uint2 load_once_8(const void* address) {
  uint2 value;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];"
               : "=r"(value.x), "=r"(value.y)
               : "l"(address));
  return value;
}

}  // namespace untorch::kernels::cuda
