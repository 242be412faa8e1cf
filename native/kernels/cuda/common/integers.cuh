// Integers of every width as wrapping 64-bit words, dispatched at run time: for kernels where an instance a type would
// multiply the code. The dtype is uniform over the grid.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

inline bool is_integer(DType dtype) {
  return dispatch_integral(dtype, [](auto) { return 0; }) == 0;
}

__device__ __forceinline__ std::uint64_t load_integer(const void* base, std::int64_t i, DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return static_cast<const std::uint8_t*>(base)[i] != 0;
    case DType::kUInt8:
      return static_cast<const std::uint8_t*>(base)[i];
    case DType::kInt8:
      return static_cast<std::uint64_t>(std::int64_t{static_cast<const std::int8_t*>(base)[i]});
    case DType::kInt16:
      return static_cast<std::uint64_t>(std::int64_t{static_cast<const std::int16_t*>(base)[i]});
    case DType::kUInt16:
      return static_cast<const std::uint16_t*>(base)[i];
    case DType::kInt32:
      return static_cast<std::uint64_t>(std::int64_t{static_cast<const std::int32_t*>(base)[i]});
    case DType::kUInt32:
      return static_cast<const std::uint32_t*>(base)[i];
    default:
      return static_cast<const std::uint64_t*>(base)[i];
  }
}

__device__ __forceinline__ void store_integer(void* base, std::int64_t i, DType dtype, std::uint64_t value) {
  switch (dtype) {
    case DType::kUInt8:
    case DType::kInt8:
      static_cast<std::uint8_t*>(base)[i] = static_cast<std::uint8_t>(value);
      break;
    case DType::kInt16:
    case DType::kUInt16:
      static_cast<std::uint16_t*>(base)[i] = static_cast<std::uint16_t>(value);
      break;
    case DType::kInt32:
    case DType::kUInt32:
      static_cast<std::uint32_t*>(base)[i] = static_cast<std::uint32_t>(value);
      break;
    default:
      static_cast<std::uint64_t*>(base)[i] = value;
      break;
  }
}

}  // namespace untorch::kernels::cuda
