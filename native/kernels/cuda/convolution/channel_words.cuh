// The channels in 4 bytes of memory, one float or two of a half type, as floats.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

template <class T>
constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ void unpack_word(std::uint32_t word, float* to) {
  if constexpr (std::is_same_v<T, float>) {
    to[0] = __uint_as_float(word);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
  } else {
    const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
    to[0] = pair.x, to[1] = pair.y;
  }
}

template <class T>
__device__ __forceinline__ std::uint32_t pack_word(const float* from) {
  if constexpr (std::is_same_v<T, float>) {
    return __float_as_uint(from[0]);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(from[0], from[1]);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(from[0], from[1]);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

}  // namespace untorch::kernels::cuda
