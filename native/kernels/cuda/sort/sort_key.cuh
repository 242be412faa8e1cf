// Every real dtype as an unsigned key in whose order PyTorch sorts: NaN is the largest, -0 equals 0. Descending order
// is ascending order of the complement, so that a stable sort keeps equal elements in place in both directions.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

struct KeyRule {
  enum Kind : int { kUnsigned, kSigned, kFloating, kBool } kind = kUnsigned;
  bool descending = false;
  int bits = 0;                // of the dtype
  std::uint64_t mask = 0;      // those bits
  std::uint64_t sign = 0;      // the highest of them
  std::uint64_t infinity = 0;  // the bits of +infinity; a magnitude above is NaN
  int bytes() const { return bits / 8; }
};

// False for a dtype that has no order (complex) or no kernel.
inline bool key_rule(DType dtype, bool descending, KeyRule& rule) {
  const auto set = [&](KeyRule::Kind kind, int bits, std::uint64_t infinity = 0) {
    rule.kind = kind;
    rule.descending = descending;
    rule.bits = bits;
    rule.mask = bits == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << bits) - 1;
    rule.sign = std::uint64_t{1} << (bits - 1);
    rule.infinity = infinity;
    return true;
  };
  switch (dtype) {
    case DType::kBool:
      return set(KeyRule::kBool, 8);
    case DType::kUInt8:
      return set(KeyRule::kUnsigned, 8);
    case DType::kUInt16:
      return set(KeyRule::kUnsigned, 16);
    case DType::kUInt32:
      return set(KeyRule::kUnsigned, 32);
    case DType::kUInt64:
      return set(KeyRule::kUnsigned, 64);
    case DType::kInt8:
      return set(KeyRule::kSigned, 8);
    case DType::kInt16:
      return set(KeyRule::kSigned, 16);
    case DType::kInt32:
      return set(KeyRule::kSigned, 32);
    case DType::kInt64:
      return set(KeyRule::kSigned, 64);
    case DType::kFloat16:
      return set(KeyRule::kFloating, 16, 0x7c00);
    case DType::kBFloat16:
      return set(KeyRule::kFloating, 16, 0x7f80);
    case DType::kFloat32:
      return set(KeyRule::kFloating, 32, 0x7f800000);
    case DType::kFloat64:
      return set(KeyRule::kFloating, 64, 0x7ff0000000000000);
    default:
      return false;
  }
}

// Key: uint32_t for dtypes of up to 32 bits (the narrow ones in its low bits), uint64_t for those of 64.
template <class Key>
__device__ __forceinline__ Key encode(Key bits, const KeyRule& rule) {
  const auto mask = static_cast<Key>(rule.mask), sign = static_cast<Key>(rule.sign);
  Key key = bits;
  if (rule.kind == KeyRule::kSigned) {
    key = bits ^ sign;
  } else if (rule.kind == KeyRule::kBool) {
    key = bits != 0;
  } else if (rule.kind == KeyRule::kFloating) {
    const Key magnitude = bits & (sign - 1);
    key = magnitude > static_cast<Key>(rule.infinity) ? mask
          : magnitude == 0                            ? sign
          : (bits & sign) != 0                        ? ~bits & mask
                                                      : bits | sign;
  }
  return rule.descending ? ~key & mask : key;
}

// The bits of element i of an array of `bytes`-sized elements. The size is the same for every thread.
template <class Key>
__device__ __forceinline__ Key load_bits(const void* base, std::int64_t i, int bytes) {
  if constexpr (sizeof(Key) == 8) {
    return static_cast<const std::uint64_t*>(base)[i];
  } else {
    if (bytes == 4) return static_cast<const std::uint32_t*>(base)[i];
    if (bytes == 2) return static_cast<const std::uint16_t*>(base)[i];
    return static_cast<const std::uint8_t*>(base)[i];
  }
}

template <class Key>
__device__ __forceinline__ Key load_key(const void* base, std::int64_t i, const KeyRule& rule) {
  return encode<Key>(load_bits<Key>(base, i, rule.bits / 8), rule);
}

// to[i] = from[j], elements of `bytes` (1, 2, 4 or 8).
__device__ __forceinline__ void move_element(void* to, std::int64_t i, const void* from, std::int64_t j, int bytes) {
  switch (bytes) {
    case 1:
      static_cast<std::uint8_t*>(to)[i] = static_cast<const std::uint8_t*>(from)[j];
      break;
    case 2:
      static_cast<std::uint16_t*>(to)[i] = static_cast<const std::uint16_t*>(from)[j];
      break;
    case 4:
      static_cast<std::uint32_t*>(to)[i] = static_cast<const std::uint32_t*>(from)[j];
      break;
    default:
      static_cast<std::uint64_t*>(to)[i] = static_cast<const std::uint64_t*>(from)[j];
      break;
  }
}

}  // namespace untorch::kernels::cuda
