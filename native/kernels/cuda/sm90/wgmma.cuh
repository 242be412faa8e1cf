// WGMMA (wgmma.mma_async, sm_90a): the asynchronous tensor-core instructions of a warpgroup, A from registers or
// shared memory.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

// Orders the warpgroup's register writes before the WGMMAs that follow.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Makes this thread's writes to shared memory visible to the async proxy: to WGMMA's reads of B.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The lower half of the shared-memory descriptor of a K-major operand with 128-byte swizzle (8 rows of 128 bytes are
// 1024) at `address`; 16 bytes further along K add 1. The upper half is the same for all: UNTORCH_DESCRIPTOR.
__device__ __forceinline__ std::uint32_t smem_descriptor(std::uint32_t address) {
  constexpr std::uint32_t kUnused = 1u << 16;
  return kUnused | ((address & 0x3ffff) >> 4);
}

// The A fragments of two k16 steps, from the pairs that a lane dequantized of a word of two 8-column tiles each.
__device__ __forceinline__ void pack_a_fragments(const std::uint32_t (&low)[4], const std::uint32_t (&high)[4],
                                                 std::uint32_t (&a)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    a[half][0] = low[2 * half], a[half][1] = high[2 * half];
    a[half][2] = low[2 * half + 1], a[half][3] = high[2 * half + 1];
  }
}

#define UNTORCH_REGS4 "%0, %1, %2, %3"
#define UNTORCH_REGS8 UNTORCH_REGS4 ", %4, %5, %6, %7"
#define UNTORCH_REGS16 UNTORCH_REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define UNTORCH_REGS32 \
  UNTORCH_REGS16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UNTORCH_REGS48 \
  UNTORCH_REGS32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define UNTORCH_REGS64                                                                                          \
  UNTORCH_REGS32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define UNTORCH_REGS80 \
  UNTORCH_REGS64       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define UNTORCH_REGS96                                                                                          \
  UNTORCH_REGS64                                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define UNTORCH_REGS112 \
  UNTORCH_REGS96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define UNTORCH_REGS128 \
  UNTORCH_REGS112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define UNTORCH_ACC4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define UNTORCH_ACC8(i) UNTORCH_ACC4(i), UNTORCH_ACC4((i) + 4)
#define UNTORCH_ACC16(i) UNTORCH_ACC8(i), UNTORCH_ACC8((i) + 8)
#define UNTORCH_ACC32(i) UNTORCH_ACC16(i), UNTORCH_ACC16((i) + 16)
#define UNTORCH_ACC48(i) UNTORCH_ACC32(i), UNTORCH_ACC16((i) + 32)
#define UNTORCH_ACC64(i) UNTORCH_ACC32(i), UNTORCH_ACC32((i) + 32)
#define UNTORCH_ACC80(i) UNTORCH_ACC64(i), UNTORCH_ACC16((i) + 64)
#define UNTORCH_ACC96(i) UNTORCH_ACC64(i), UNTORCH_ACC32((i) + 64)
#define UNTORCH_ACC112(i) UNTORCH_ACC96(i), UNTORCH_ACC16((i) + 96)
#define UNTORCH_ACC128(i) UNTORCH_ACC64(i), UNTORCH_ACC64((i) + 64)
// The upper half of the descriptor: 128-byte swizzle, and a stride of 1024 bytes, in units of 16.
#define UNTORCH_DESCRIPTOR(at) "{.reg .b32 up;\n.reg .b64 b;\nmov.b32 up, 0x40000040;\nmov.b64 b, {%" #at ", up};\n"
#define UNTORCH_WGMMA(n, type, accumulators, a0, a1, a2, a3, at)                                                \
  asm volatile(UNTORCH_DESCRIPTOR(at) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type           \
                                      " {" UNTORCH_REGS##accumulators "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 \
                                                                      "}, b, 1, 1, 1, 0;\n}"                    \
               : UNTORCH_ACC##accumulators(0)                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define UNTORCH_WGMMA_OF(n, accumulators, a0, a1, a2, a3, at)   \
  if constexpr (std::is_same_v<T, __half>) {                    \
    UNTORCH_WGMMA(n, "f16", accumulators, a0, a1, a2, a3, at);  \
  } else {                                                      \
    UNTORCH_WGMMA(n, "bf16", accumulators, a0, a1, a2, a3, at); \
  }

// wgmma.m64nNk16, N = 2 · Accumulators: d (64 × N, float32) += a (64 × 16, registers) · b (16 × N, shared memory). A
// warp has 16 rows of a and d, with fragments as in mma_sync.cuh; columns 8i + 2t and the next of d are in d[4i] to
// d[4i + 3]. b: smem_descriptor's.
template <class T, int Accumulators>
__device__ __forceinline__ void wgmma(float (&d)[Accumulators], const std::uint32_t (&a)[4], std::uint32_t b) {
  static_assert(Accumulators == 4 || Accumulators == 8 || Accumulators == 16 || Accumulators == 32 ||
                Accumulators == 64 || Accumulators == 96 || Accumulators == 112 || Accumulators == 128);
  if constexpr (Accumulators == 4) {
    UNTORCH_WGMMA_OF(8, 4, 4, 5, 6, 7, 8)
  } else if constexpr (Accumulators == 8) {
    UNTORCH_WGMMA_OF(16, 8, 8, 9, 10, 11, 12)
  } else if constexpr (Accumulators == 16) {
    UNTORCH_WGMMA_OF(32, 16, 16, 17, 18, 19, 20)
  } else if constexpr (Accumulators == 32) {
    UNTORCH_WGMMA_OF(64, 32, 32, 33, 34, 35, 36)
  } else if constexpr (Accumulators == 64) {
    UNTORCH_WGMMA_OF(128, 64, 64, 65, 66, 67, 68)
  } else if constexpr (Accumulators == 96) {
    UNTORCH_WGMMA_OF(192, 96, 96, 97, 98, 99, 100)
  } else if constexpr (Accumulators == 112) {
    UNTORCH_WGMMA_OF(224, 112, 112, 113, 114, 115, 116)
  } else {
    UNTORCH_WGMMA_OF(256, 128, 128, 129, 130, 131, 132)
  }
}

#define UNTORCH_WGMMA_SS(n, type, accumulators, at_a, at_b, at_major)                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" UNTORCH_REGS##accumulators \
               "}, %" #at_a ", %" #at_b ", 1, 1, 1, %" #at_major ", 0;"                                        \
               : UNTORCH_ACC##accumulators(0)                                                                  \
               : "l"(a), "l"(b), "n"(AColumnMajor ? 1 : 0))
#define UNTORCH_WGMMA_SS_OF(n, accumulators, at_a, at_b, at_major)   \
  if constexpr (std::is_same_v<T, __half>) {                         \
    UNTORCH_WGMMA_SS(n, "f16", accumulators, at_a, at_b, at_major);  \
  } else {                                                           \
    UNTORCH_WGMMA_SS(n, "bf16", accumulators, at_a, at_b, at_major); \
  }

// A shared-memory descriptor with 128-byte swizzle, of an operand in rows of 128 bytes: K-major, or M-major with 64 of
// M a row (8 rows of k are 1024 bytes, and 16 bytes further along k are 128 · 16).
__device__ __forceinline__ std::uint64_t full_smem_descriptor(std::uint32_t address) {
  constexpr std::uint64_t kUpper = 0x4000004000400000;  // swizzle; both strides 1024 bytes, in units of 16
  return kUpper | ((address & 0x3ffff) >> 4);
}

// wgmma.m64nNk16, N = 2 · Accumulators, both operands from shared memory: d as wgmma's. a: 64 × 16, K-major or, with
// AColumnMajor, M-major; b: 16 × N, K-major. a, b: full_smem_descriptor's.
template <class T, bool AColumnMajor, int Accumulators>
__device__ __forceinline__ void wgmma_ss(float (&d)[Accumulators], std::uint64_t a, std::uint64_t b) {
  static_assert(Accumulators == 8 || (Accumulators % 16 == 0 && Accumulators <= 128));
  if constexpr (Accumulators == 8) {
    UNTORCH_WGMMA_SS_OF(16, 8, 8, 9, 10)
  } else if constexpr (Accumulators == 16) {
    UNTORCH_WGMMA_SS_OF(32, 16, 16, 17, 18)
  } else if constexpr (Accumulators == 32) {
    UNTORCH_WGMMA_SS_OF(64, 32, 32, 33, 34)
  } else if constexpr (Accumulators == 48) {
    UNTORCH_WGMMA_SS_OF(96, 48, 48, 49, 50)
  } else if constexpr (Accumulators == 64) {
    UNTORCH_WGMMA_SS_OF(128, 64, 64, 65, 66)
  } else if constexpr (Accumulators == 80) {
    UNTORCH_WGMMA_SS_OF(160, 80, 80, 81, 82)
  } else if constexpr (Accumulators == 96) {
    UNTORCH_WGMMA_SS_OF(192, 96, 96, 97, 98)
  } else if constexpr (Accumulators == 112) {
    UNTORCH_WGMMA_SS_OF(224, 112, 112, 113, 114)
  } else {
    UNTORCH_WGMMA_SS_OF(256, 128, 128, 129, 130)
  }
}

#undef UNTORCH_REGS4
#undef UNTORCH_REGS8
#undef UNTORCH_REGS16
#undef UNTORCH_REGS32
#undef UNTORCH_REGS64
#undef UNTORCH_REGS96
#undef UNTORCH_REGS112
#undef UNTORCH_REGS128
#undef UNTORCH_ACC4
#undef UNTORCH_ACC8
#undef UNTORCH_ACC16
#undef UNTORCH_ACC32
#undef UNTORCH_ACC64
#undef UNTORCH_ACC96
#undef UNTORCH_ACC112
#undef UNTORCH_ACC128
#undef UNTORCH_DESCRIPTOR
#undef UNTORCH_WGMMA
#undef UNTORCH_REGS48
#undef UNTORCH_REGS80
#undef UNTORCH_ACC48
#undef UNTORCH_ACC80
#undef UNTORCH_WGMMA_SS
#undef UNTORCH_WGMMA_SS_OF
#undef UNTORCH_WGMMA_OF

}  // namespace untorch::kernels::cuda
