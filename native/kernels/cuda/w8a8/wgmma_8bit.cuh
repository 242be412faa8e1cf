// WGMMA of 8-bit operands, int8 and E4M3, both from shared memory (sm_90a).
#pragma once

#include "kernels/cuda/sm90/wgmma.cuh"
#include "kernels/cuda/w8a8/w8_values.cuh"

namespace untorch::kernels::cuda {

// Of sums of products: exact in int32 for int8.
template <class W>
using WgmmaSum = std::conditional_t<std::is_same_v<W, E4m3Weight>, float, int>;

#define UNTORCH_REGS8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define UNTORCH_REGS12 UNTORCH_REGS8 ", %8, %9, %10, %11"
#define UNTORCH_REGS16 UNTORCH_REGS12 ", %12, %13, %14, %15"
#define UNTORCH_REGS32 UNTORCH_REGS16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define UNTORCH_REGS64                                                                                          \
  UNTORCH_REGS32                                                                                                \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
  "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define UNTORCH_REGS96                                                                                          \
  UNTORCH_REGS64                                                                                                \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
  "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define UNTORCH_REGS128                                                                                        \
  UNTORCH_REGS96                                                                                               \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, " \
  "%114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// c: the constraint of an accumulator
#define UNTORCH_ACC4(c, i) c(d[i]), c(d[(i) + 1]), c(d[(i) + 2]), c(d[(i) + 3])
#define UNTORCH_ACC8(c, i) UNTORCH_ACC4(c, i), UNTORCH_ACC4(c, (i) + 4)
#define UNTORCH_ACC12(c, i) UNTORCH_ACC8(c, i), UNTORCH_ACC4(c, (i) + 8)
#define UNTORCH_ACC16(c, i) UNTORCH_ACC8(c, i), UNTORCH_ACC8(c, (i) + 8)
#define UNTORCH_ACC32(c, i) UNTORCH_ACC16(c, i), UNTORCH_ACC16(c, (i) + 16)
#define UNTORCH_ACC64(c, i) UNTORCH_ACC32(c, i), UNTORCH_ACC32(c, (i) + 32)
#define UNTORCH_ACC96(c, i) UNTORCH_ACC64(c, i), UNTORCH_ACC32(c, (i) + 64)
#define UNTORCH_ACC128(c, i) UNTORCH_ACC64(c, i), UNTORCH_ACC64(c, (i) + 64)
#define UNTORCH_WGMMA(n, types, scales, c, accumulators, at_a, at_b, at_add)                                        \
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %" #at_add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k32." types \
               " {" UNTORCH_REGS##accumulators "}, %" #at_a ", %" #at_b ", p" scales ";\n}"                         \
               : UNTORCH_ACC##accumulators(c, 0)                                                                    \
               : "l"(a), "l"(b), "r"(add))
#define UNTORCH_WGMMA_OF(n, accumulators, at_a, at_b, at_add)                              \
  if constexpr (Accumulators == accumulators) {                                            \
    if constexpr (std::is_same_v<W, E4m3Weight>) {                                         \
      UNTORCH_WGMMA(n, "f32.e4m3.e4m3", ", 1, 1", "+f", accumulators, at_a, at_b, at_add); \
    } else {                                                                               \
      UNTORCH_WGMMA(n, "s32.s8.s8", "", "+r", accumulators, at_a, at_b, at_add);           \
    }                                                                                      \
  }

// wgmma.m64nNk32, N = 2 · Accumulators: d (64 × N) = a (64 × 32) · bᵀ (N × 32), added to d unless `add` is 0.
// a, b: K-major, full_smem_descriptor's. d as that of wgmma (wgmma.cuh).
template <class W, int Accumulators>
__device__ __forceinline__ void wgmma_8bit(WgmmaSum<W> (&d)[Accumulators], std::uint64_t a, std::uint64_t b, int add) {
  static_assert(Accumulators == 8 || Accumulators == 12 || Accumulators == 16 || Accumulators == 32 ||
                Accumulators == 64 || Accumulators == 96 || Accumulators == 128);
  UNTORCH_WGMMA_OF(16, 8, 8, 9, 10)
  UNTORCH_WGMMA_OF(24, 12, 12, 13, 14)
  UNTORCH_WGMMA_OF(32, 16, 16, 17, 18)
  UNTORCH_WGMMA_OF(64, 32, 32, 33, 34)
  UNTORCH_WGMMA_OF(128, 64, 64, 65, 66)
  UNTORCH_WGMMA_OF(192, 96, 96, 97, 98)
  UNTORCH_WGMMA_OF(256, 128, 128, 129, 130)
}

#undef UNTORCH_REGS8
#undef UNTORCH_REGS12
#undef UNTORCH_REGS16
#undef UNTORCH_REGS32
#undef UNTORCH_REGS64
#undef UNTORCH_REGS96
#undef UNTORCH_REGS128
#undef UNTORCH_ACC4
#undef UNTORCH_ACC8
#undef UNTORCH_ACC12
#undef UNTORCH_ACC16
#undef UNTORCH_ACC32
#undef UNTORCH_ACC64
#undef UNTORCH_ACC96
#undef UNTORCH_ACC128
#undef UNTORCH_WGMMA
#undef UNTORCH_WGMMA_OF

}  // namespace untorch::kernels::cuda
