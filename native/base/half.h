// float16, bfloat16 and complex as storage types in host code.
#pragma once

#include <cstdint>
#include <cstring>

namespace untorch {

// IEEE binary16 and bfloat16 as storage types: arithmetic happens in float.
struct Half {
  std::uint16_t bits;
  Half() = default;
  explicit Half(float value) noexcept;
  operator float() const noexcept;  // NOLINT(google-explicit-constructor)
};

struct BFloat16 {
  std::uint16_t bits;
  BFloat16() = default;
  explicit BFloat16(float value) noexcept {
    std::uint32_t u;
    std::memcpy(&u, &value, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<std::uint16_t>((u >> 16) | 0x0040u);  // keep NaN a NaN
    } else {
      bits = static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  operator float() const noexcept {  // NOLINT(google-explicit-constructor)
    const std::uint32_t u = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &u, sizeof value);
    return value;
  }
};

inline Half::operator float() const noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t mantissa = bits & 0x3ffu;
  const std::uint32_t exponent = (bits >> 10) & 0x1fu;
  float value;
  if (exponent == 0) {
    // Subnormal halves are exact multiples of 2^-24.
    value = static_cast<float>(mantissa) * 5.9604644775390625e-08f;
    std::uint32_t u;
    std::memcpy(&u, &value, sizeof u);
    u |= sign;
    std::memcpy(&value, &u, sizeof value);
    return value;
  }
  const std::uint32_t u =
      exponent == 31 ? sign | 0x7f800000u | (mantissa << 13) : sign | ((exponent + 112u) << 23) | (mantissa << 13);
  std::memcpy(&value, &u, sizeof value);
  return value;
}

inline Half::Half(float value) noexcept {
  std::uint32_t u;
  std::memcpy(&u, &value, sizeof u);
  const std::uint16_t sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) {
    bits = static_cast<std::uint16_t>(sign | 0x7e00u);
  } else if (u >= 0x477ff000u) {  // 65520 and above round to infinity
    bits = static_cast<std::uint16_t>(sign | 0x7c00u);
  } else if (u >= 0x38800000u) {  // normal halves: round the mantissa to nearest even
    const std::uint32_t r = u - 0x38000000u + 0xfffu + ((u >> 13) & 1u);
    bits = static_cast<std::uint16_t>(sign | (r >> 13));
  } else {  // subnormal: adding 0.5 in float aligns the mantissa and rounds to nearest even
    float magnitude;
    std::memcpy(&magnitude, &u, sizeof magnitude);
    magnitude += 0.5f;
    std::memcpy(&u, &magnitude, sizeof u);
    bits = static_cast<std::uint16_t>(sign | (u - 0x3f000000u));
  }
}

template <class T>
struct Complex {
  T re, im;
};
using Complex64 = Complex<float>;
using Complex128 = Complex<double>;

}  // namespace untorch
