// The tensor cores' matrix instruction on half types.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

// d (16 x 8, float32) = c + a (16 x 16) · b (16 x 8). Thread (g, t) = (lane / 4, lane % 4) holds, as pairs along k: a0
// row g, a1 row g + 8, both at k = 2 t; a2 and a3 the same at k = 2 t + 8; b0 column g at k = 2 t, b1 at k = 2 t + 8;
// and of d rows g (d[0], d[1]) and g + 8 (d[2], d[3]) in columns 2 t and 2 t + 1.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1, const float (&c)[4]) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}
// d += a · b.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                    unsigned b1) {
  mma<T>(d, a0, a1, a2, a3, b0, b1, d);
}

}  // namespace untorch::kernels::cuda
