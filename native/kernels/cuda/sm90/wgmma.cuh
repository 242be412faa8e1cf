// The matrix instructions of sm_90 that a warpgroup, four warps, issues together and that run on their own.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

// Orders what the warpgroup's threads wrote to registers before the instructions that follow.
__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Makes what this thread copied to shared memory visible to the tensor cores' own reads.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// An operand in shared memory: rows of 128 bytes along k, swizzled, 8 of them 1024 bytes, at `address`. The lower half
// of its description; 16 bytes further on is one more. The upper half is the same for all: UNTORCH_OPERAND.
__device__ __forceinline__ std::uint32_t operand_at(std::uint32_t address) {
  constexpr std::uint32_t kUnused = 1u << 16;
  return kUnused | ((address & 0x3ffff) >> 4);
}

// A lane's pairs of two tiles of 8 columns, unpacked from a word of each, as the first operands for 16 k's and the
// next.
__device__ __forceinline__ void operands_of_words(const std::uint32_t (&low)[4], const std::uint32_t (&high)[4],
                                                  std::uint32_t (&operand)[2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    operand[half][0] = low[2 * half], operand[half][1] = high[2 * half];
    operand[half][2] = low[2 * half + 1], operand[half][3] = high[2 * half + 1];
  }
}

#define UNTORCH_REGS4 "%0, %1, %2, %3"
#define UNTORCH_REGS8 UNTORCH_REGS4 ", %4, %5, %6, %7"
#define UNTORCH_REGS16 UNTORCH_REGS8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define UNTORCH_REGS32 \
  UNTORCH_REGS16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UNTORCH_REGS64                                                                                          \
  UNTORCH_REGS32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define UNTORCH_REGS96                                                                                          \
  UNTORCH_REGS64                                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define UNTORCH_REGS112 \
  UNTORCH_REGS96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define UNTORCH_REGS128 \
  UNTORCH_REGS112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define UNTORCH_SUMS4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define UNTORCH_SUMS8(i) UNTORCH_SUMS4(i), UNTORCH_SUMS4((i) + 4)
#define UNTORCH_SUMS16(i) UNTORCH_SUMS8(i), UNTORCH_SUMS8((i) + 8)
#define UNTORCH_SUMS32(i) UNTORCH_SUMS16(i), UNTORCH_SUMS16((i) + 16)
#define UNTORCH_SUMS64(i) UNTORCH_SUMS32(i), UNTORCH_SUMS32((i) + 32)
#define UNTORCH_SUMS96(i) UNTORCH_SUMS64(i), UNTORCH_SUMS32((i) + 64)
#define UNTORCH_SUMS112(i) UNTORCH_SUMS96(i), UNTORCH_SUMS16((i) + 96)
#define UNTORCH_SUMS128(i) UNTORCH_SUMS64(i), UNTORCH_SUMS64((i) + 64)
// 128-byte swizzle, and 1024 bytes in units of 16.
#define UNTORCH_OPERAND(at) "{.reg .b32 up;\n.reg .b64 b;\nmov.b32 up, 0x40000040;\nmov.b64 b, {%" #at ", up};\n"
#define UNTORCH_WGMMA(columns, type, sums, a0, a1, a2, a3, at)                                           \
  asm volatile(UNTORCH_OPERAND(at) "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type \
                                   " {" UNTORCH_REGS##sums "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3     \
                                                           "}, b, 1, 1, 1, 0;\n}"                        \
               : UNTORCH_SUMS##sums(0)                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b))
#define UNTORCH_WGMMA_OF(columns, sums, a0, a1, a2, a3, at)   \
  if constexpr (std::is_same_v<T, __half>) {                  \
    UNTORCH_WGMMA(columns, "f16", sums, a0, a1, a2, a3, at);  \
  } else {                                                    \
    UNTORCH_WGMMA(columns, "bf16", sums, a0, a1, a2, a3, at); \
  }

// d (64 x 2 Sums, float32) += a (64 x 16, in registers) · b (16 x 2 Sums). A warp has 16 rows of a and d, as in
// mma_sync.cuh; of d the columns 8 i + 2 t and the next in d[4 i] to d[4 i + 3]. b: operand_at's.
template <class T, int Sums>
__device__ __forceinline__ void warpgroup_mma(float (&d)[Sums], const std::uint32_t (&a)[4], std::uint32_t b) {
  static_assert(Sums == 4 || Sums == 8 || Sums == 16 || Sums == 32 || Sums == 64 || Sums == 96 || Sums == 112 ||
                Sums == 128);
  if constexpr (Sums == 4) {
    UNTORCH_WGMMA_OF(8, 4, 4, 5, 6, 7, 8)
  } else if constexpr (Sums == 8) {
    UNTORCH_WGMMA_OF(16, 8, 8, 9, 10, 11, 12)
  } else if constexpr (Sums == 16) {
    UNTORCH_WGMMA_OF(32, 16, 16, 17, 18, 19, 20)
  } else if constexpr (Sums == 32) {
    UNTORCH_WGMMA_OF(64, 32, 32, 33, 34, 35, 36)
  } else if constexpr (Sums == 64) {
    UNTORCH_WGMMA_OF(128, 64, 64, 65, 66, 67, 68)
  } else if constexpr (Sums == 96) {
    UNTORCH_WGMMA_OF(192, 96, 96, 97, 98, 99, 100)
  } else if constexpr (Sums == 112) {
    UNTORCH_WGMMA_OF(224, 112, 112, 113, 114, 115, 116)
  } else {
    UNTORCH_WGMMA_OF(256, 128, 128, 129, 130, 131, 132)
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
#undef UNTORCH_SUMS4
#undef UNTORCH_SUMS8
#undef UNTORCH_SUMS16
#undef UNTORCH_SUMS32
#undef UNTORCH_SUMS64
#undef UNTORCH_SUMS96
#undef UNTORCH_SUMS112
#undef UNTORCH_SUMS128
#undef UNTORCH_OPERAND
#undef UNTORCH_WGMMA
#undef UNTORCH_WGMMA_OF

}  // namespace untorch::kernels::cuda
