// 8-bit weights, int8 and float8_e4m3fn: their values, and the tensor cores' products of them.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

struct Int8Weight {};
struct E4m3Weight {};

template <class W>
__device__ __forceinline__ float weight_value(std::uint32_t byte) {
  if constexpr (std::is_same_v<W, E4m3Weight>) {
    // Exponent and mantissa where float32 has them; its bias is larger by 120. Subnormals are subnormals there.
    return __uint_as_float((byte & 0x80u) << 24 | (byte & 0x7fu) << 20) * 0x1p120f;
  } else {
    return static_cast<float>(static_cast<std::int8_t>(byte));
  }
}

// d (16 × 8) += a (16 × 32) · b (32 × 8), of 8-bit values; sm_89 and newer for E4M3. Four along k to a word; fragments
// of lane (g, t): a0 row g, k 4t   a1 row g + 8, k 4t   a2 row g, k 4t + 16   a3 row g + 8, k 4t + 16;   b0 k 4t   b1 k
// 4t + 16 of column g; d[0], d[1] row g, columns 2t and 2t + 1, d[2], d[3] row g + 8.
template <class W>
__device__ __forceinline__ void mma_8bit(float (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                         std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  static_assert(std::is_same_v<W, E4m3Weight>);
#if __CUDA_ARCH__ >= 890
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#endif
}
template <class W>
__device__ __forceinline__ void mma_8bit(int (&d)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t a2,
                                         std::uint32_t a3, std::uint32_t b0, std::uint32_t b1) {
  static_assert(std::is_same_v<W, Int8Weight>);
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// body(weight type) for the dtype; kNoKernel for others.
template <class Body>
int dispatch_weight(DType dtype, Body&& body) {
  if (dtype == DType::kInt8) return body(Int8Weight{});
  return dtype == DType::kFloat8E4M3FN ? body(E4m3Weight{}) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
