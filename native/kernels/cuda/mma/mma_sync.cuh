// mma.sync.m16n8k16 on float16 and bfloat16, m16n8k8 on TF32; float32 accumulators (sm_80 and newer).
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

// d (16 × 8) = c + a (16 × 16) · b (16 × 8). Fragments of lane (g, t) = (lane / 4, lane % 4), pairs along k:
//   a0 row g,     k 2t      a1 row g + 8, k 2t      a2 row g, k 2t + 8      a3 row g + 8, k 2t + 8
//   b0 column g,  k 2t      b1 column g,  k 2t + 8
//   d[0], d[1] row g, columns 2t and 2t + 1         d[2], d[3] row g + 8, the same columns
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
// d (16 × 8) += a (16 × 8) · b (8 × 8), of TF32 values. Fragments of lane (g, t):
//   a0 row g,    k t   a1 row g + 8, k t   a2 row g, k t + 4   a3 row g + 8, k t + 4;   b0 column g, k t   b1 k t + 4
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace untorch::kernels::cuda
