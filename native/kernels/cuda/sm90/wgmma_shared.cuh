// WGMMA with B K-major or MN-major in shared memory, and A from shared memory or from registers (sm_90a).
#pragma once

#include "kernels/cuda/sm90/wgmma.cuh"

namespace untorch::kernels::cuda {

// The lower half of the descriptor of an MN-major operand with 128-byte swizzle: rows of K with 64 elements of MN each,
// 8 rows are 1024 bytes. leading_bytes: from one group of 64 MN to the next.
__device__ __forceinline__ std::uint32_t mn_major_descriptor(std::uint32_t address, int leading_bytes) {
  return static_cast<std::uint32_t>(leading_bytes >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

// Keeps the compiler from moving reads and writes of registers across an asynchronous instruction's issue or wait.
template <int Count>
__device__ __forceinline__ void fence_registers(float (&values)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(values[i])::"memory");
}
template <int Count>
__device__ __forceinline__ void fence_registers(std::uint32_t (&values)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

#define UNTORCH_R4(a, b, c, e) "%" #a ", %" #b ", %" #c ", %" #e
#define UNTORCH_REGS32                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
  "%23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UNTORCH_REGS40 UNTORCH_REGS32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define UNTORCH_REGS48 UNTORCH_REGS40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define UNTORCH_REGS56 UNTORCH_REGS48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define UNTORCH_REGS64 UNTORCH_REGS56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define UNTORCH_REGS80 UNTORCH_REGS64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define UNTORCH_REGS88 UNTORCH_REGS80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define UNTORCH_REGS96 UNTORCH_REGS88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define UNTORCH_REGS128                                                                                        \
  UNTORCH_REGS96                                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define UNTORCH_ACC8(i)                                                                                 \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define UNTORCH_ACC16(i) UNTORCH_ACC8(i), UNTORCH_ACC8((i) + 8)
#define UNTORCH_ACC32 UNTORCH_ACC16(0), UNTORCH_ACC16(16)
#define UNTORCH_ACC40 UNTORCH_ACC32, UNTORCH_ACC8(32)
#define UNTORCH_ACC48 UNTORCH_ACC32, UNTORCH_ACC16(32)
#define UNTORCH_ACC56 UNTORCH_ACC48, UNTORCH_ACC8(48)
#define UNTORCH_ACC64 UNTORCH_ACC48, UNTORCH_ACC16(48)
#define UNTORCH_ACC80 UNTORCH_ACC64, UNTORCH_ACC16(64)
#define UNTORCH_ACC88 UNTORCH_ACC80, UNTORCH_ACC8(80)
#define UNTORCH_ACC96 UNTORCH_ACC80, UNTORCH_ACC16(80)
#define UNTORCH_ACC128 UNTORCH_ACC96, UNTORCH_ACC16(96), UNTORCH_ACC16(112)

// The upper half of a descriptor: 128-byte swizzle, bytes from 8 rows to the next in units of 16.
constexpr std::uint32_t descriptor_upper(int group_bytes) {
  return 1u << 30 | static_cast<std::uint32_t>(group_bytes >> 4);
}

#define UNTORCH_SS(n, type, accumulators, a, b, scale, a_up, b_up)                                                    \
  asm volatile("{.reg .b64 da, db;\n.reg .pred p;\nmov.b64 da, {%" #a ", %" #a_up "};\nmov.b64 db, {%" #b ", %" #b_up \
               "};\nsetp.ne.b32 p, %" #scale                                                                          \
               ", 0;\n"                                                                                               \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" UNTORCH_REGS##accumulators        \
               "}, da, db, p, 1, 1, 0, 0;\n}"                                                                         \
               : UNTORCH_ACC##accumulators                                                                            \
               : "r"(a_low), "r"(b_low), "n"(Accumulate ? 1 : 0), "r"(descriptor_upper(1024)),                        \
                 "r"(descriptor_upper(BGroupBytes)))
#define UNTORCH_RS(n, type, accumulators, a0, a1, a2, a3, b, b_up)                                             \
  asm volatile("{.reg .b64 db;\nmov.b64 db, {%" #b ", %" #b_up                                                 \
               "};\n"                                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" UNTORCH_REGS##accumulators \
               "}, {" UNTORCH_R4(a0, a1, a2, a3) "}, db, 1, 1, 1, 1;\n}"                                       \
               : UNTORCH_ACC##accumulators                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(descriptor_upper(BGroupBytes)))
#define UNTORCH_OF(macro, n, accumulators, ...)    \
  if constexpr (Accumulators == accumulators) {    \
    if constexpr (std::is_same_v<T, __half>) {     \
      macro(n, "f16", accumulators, __VA_ARGS__);  \
    } else {                                       \
      macro(n, "bf16", accumulators, __VA_ARGS__); \
    }                                              \
  }

// d (64 × N, float32; N = 2 · Accumulators) = a · bᵀ, added to d if Accumulate. a (64 × 16) and b (N × 16) are K-major
// in shared memory: smem_descriptor's. BGroupBytes: from 8 rows of b to the next.
template <class T, bool Accumulate, int BGroupBytes = 1024, int Accumulators>
__device__ __forceinline__ void wgmma_shared(float (&d)[Accumulators], std::uint32_t a_low, std::uint32_t b_low) {
  static_assert(Accumulators == 32 || Accumulators == 40 || Accumulators == 48 || Accumulators == 56 ||
                Accumulators == 64 || Accumulators == 80 || Accumulators == 88 || Accumulators == 96 ||
                Accumulators == 128);
  UNTORCH_OF(UNTORCH_SS, 64, 32, 32, 33, 34, 35, 36)
  UNTORCH_OF(UNTORCH_SS, 80, 40, 40, 41, 42, 43, 44)
  UNTORCH_OF(UNTORCH_SS, 96, 48, 48, 49, 50, 51, 52)
  UNTORCH_OF(UNTORCH_SS, 112, 56, 56, 57, 58, 59, 60)
  UNTORCH_OF(UNTORCH_SS, 128, 64, 64, 65, 66, 67, 68)
  UNTORCH_OF(UNTORCH_SS, 160, 80, 80, 81, 82, 83, 84)
  UNTORCH_OF(UNTORCH_SS, 176, 88, 88, 89, 90, 91, 92)
  UNTORCH_OF(UNTORCH_SS, 192, 96, 96, 97, 98, 99, 100)
  UNTORCH_OF(UNTORCH_SS, 256, 128, 128, 129, 130, 131, 132)
}

// d (64 × N, float32) += a · b. a (64 × 16) in registers, as a warp's mma.m16n8k16 has it; b (16 × N) MN-major in
// shared memory: mn_major_descriptor's. BGroupBytes: from 8 rows of K to the next.
template <class T, int BGroupBytes = 1024, int Accumulators>
__device__ __forceinline__ void wgmma_mn_major(float (&d)[Accumulators], const std::uint32_t* a, std::uint32_t b_low) {
  static_assert(Accumulators == 32 || Accumulators == 48 || Accumulators == 64 || Accumulators == 96 ||
                Accumulators == 128);
  UNTORCH_OF(UNTORCH_RS, 64, 32, 32, 33, 34, 35, 36, 37)
  UNTORCH_OF(UNTORCH_RS, 96, 48, 48, 49, 50, 51, 52, 53)
  UNTORCH_OF(UNTORCH_RS, 128, 64, 64, 65, 66, 67, 68, 69)
  UNTORCH_OF(UNTORCH_RS, 192, 96, 96, 97, 98, 99, 100, 101)
  UNTORCH_OF(UNTORCH_RS, 256, 128, 128, 129, 130, 131, 132, 133)
}

#undef UNTORCH_R4
#undef UNTORCH_REGS32
#undef UNTORCH_REGS40
#undef UNTORCH_REGS48
#undef UNTORCH_REGS56
#undef UNTORCH_REGS64
#undef UNTORCH_REGS80
#undef UNTORCH_REGS88
#undef UNTORCH_REGS96
#undef UNTORCH_REGS128
#undef UNTORCH_ACC8
#undef UNTORCH_ACC16
#undef UNTORCH_ACC32
#undef UNTORCH_ACC40
#undef UNTORCH_ACC48
#undef UNTORCH_ACC56
#undef UNTORCH_ACC64
#undef UNTORCH_ACC80
#undef UNTORCH_ACC88
#undef UNTORCH_ACC96
#undef UNTORCH_ACC128
#undef UNTORCH_SS
#undef UNTORCH_RS
#undef UNTORCH_OF

}  // namespace untorch::kernels::cuda
