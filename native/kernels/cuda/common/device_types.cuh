// The C++ types behind PyTorch's dtypes in device code, and the dispatch from a dtype code to a type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// An element of that size as raw bits, for kernels that only move elements.
template <int Bytes>
struct alignas(Bytes) Bits {
  unsigned char data[Bytes];
};
template <>
struct Bits<1> {
  std::uint8_t value;
};
template <>
struct Bits<2> {
  std::uint16_t value;
};
template <>
struct Bits<4> {
  std::uint32_t value;
};
template <>
struct Bits<8> {
  std::uint64_t value;
};
template <>
struct alignas(16) Bits<16> {
  std::uint64_t low, high;
};

template <class T>
inline constexpr bool is_half_type = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;
template <class T>
inline constexpr bool is_float_type = is_half_type<T> || std::is_same_v<T, float> || std::is_same_v<T, double>;

// The accumulator type of T: float for the half types, T otherwise.
template <class T>
using Compute = std::conditional_t<is_half_type<T>, float, T>;

template <class T>
__host__ __device__ __forceinline__ Compute<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>)
    return __half2float(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __bfloat162float(value);
  else
    return value;
}

template <class T>
__host__ __device__ __forceinline__ T narrow(Compute<T> value) {
  if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(value);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>)
    return __float2bfloat16_rn(value);
  else
    return value;
}

// body(Type<T>{}) for the dtype; kNoKernel when it is not among the kinds asked for. The body returns an error code.
template <class T>
struct Type {
  using type = T;
};

// Those that are computed in float32.
template <class Body>
int dispatch_up_to_float32(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kFloat16:
      return body(Type<__half>{});
    case DType::kBFloat16:
      return body(Type<__nv_bfloat16>{});
    case DType::kFloat32:
      return body(Type<float>{});
    default:
      return kNoKernel;
  }
}

template <class Body>
int dispatch_floating(DType dtype, Body&& body) {
  return dtype == DType::kFloat64 ? body(Type<double>{}) : dispatch_up_to_float32(dtype, body);
}

template <class Body>
int dispatch_integral(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::kUInt8:
      return body(Type<std::uint8_t>{});
    case DType::kInt8:
      return body(Type<std::int8_t>{});
    case DType::kInt16:
      return body(Type<std::int16_t>{});
    case DType::kInt32:
      return body(Type<std::int32_t>{});
    case DType::kInt64:
      return body(Type<std::int64_t>{});
    case DType::kUInt16:
      return body(Type<std::uint16_t>{});
    case DType::kUInt32:
      return body(Type<std::uint32_t>{});
    case DType::kUInt64:
      return body(Type<std::uint64_t>{});
    default:
      return kNoKernel;
  }
}

// Every dtype but complex and FP8; bool as the C++ type.
template <class Body>
int dispatch_real(DType dtype, Body&& body) {
  if (dtype == DType::kBool) return body(Type<bool>{});
  const int code = dispatch_floating(dtype, body);
  return code == kNoKernel ? dispatch_integral(dtype, body) : code;
}

// By element size, for kernels that only move elements.
template <class Body>
int dispatch_bytes(int bytes, Body&& body) {
  switch (bytes) {
    case 1:
      return body(Type<Bits<1>>{});
    case 2:
      return body(Type<Bits<2>>{});
    case 4:
      return body(Type<Bits<4>>{});
    case 8:
      return body(Type<Bits<8>>{});
    case 16:
      return body(Type<Bits<16>>{});
    default:
      return kNoKernel;
  }
}

// CTAs for n elements, `per_block` each, within the grid's limit, for grid-stride loops.
inline unsigned blocks_for(std::int64_t n, int per_block) {
  const std::int64_t blocks = (n + per_block - 1) / per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks > 0x7fffffff ? 0x7fffffff : blocks);
}

}  // namespace untorch::kernels::cuda
