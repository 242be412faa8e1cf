// GEMM of int8 into int32, and what a float8 GEMM needs around the float32 one: conversions and the scales.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/gemm.h"

namespace untorch::kernels::cpu {
namespace {

struct Float8Format {
  int mantissa, bias;
  float largest;
  std::uint8_t overflow;  // what larger values become
};
constexpr Float8Format kE4M3{3, 7, 448.0f, 0x7e};  // has no infinity: saturates, infinity included
constexpr Float8Format kE5M2{2, 15, 57344.0f, 0x7c};

const Float8Format& format_of(DType dtype) { return dtype == DType::kFloat8E4M3FN ? kE4M3 : kE5M2; }

float decode(const Float8Format& format, std::uint8_t bits) {
  const int mantissa = bits & ((1 << format.mantissa) - 1);
  const int exponent = (bits & 0x7f) >> format.mantissa;
  float value = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : mantissa + (1 << format.mantissa)),
                           std::max(exponent, 1) - format.bias - format.mantissa);
  if (format.mantissa == 3) {
    if ((bits & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  } else if ((bits & 0x7f) >= 0x7c) {
    value = (bits & 0x7f) == 0x7c ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  return (bits & 0x80) != 0 ? -value : value;
}

std::uint8_t encode(const Float8Format& format, float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7f);
  const float magnitude = std::fabs(value);
  if (magnitude > 2 * format.largest) return static_cast<std::uint8_t>(sign | format.overflow);
  int exponent = magnitude == 0.0f ? 1 - format.bias : std::max(std::ilogb(magnitude), 1 - format.bias);
  auto digits = static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent)));
  if (digits == 2 << format.mantissa) digits >>= 1, ++exponent;
  if (std::ldexp(static_cast<float>(digits), exponent - format.mantissa) > format.largest) {
    return static_cast<std::uint8_t>(sign | format.overflow);
  }
  // A leading digit means a normal number: it carries one into the exponent field.
  const int field = ((exponent + format.bias - 1) << format.mantissa) + digits;
  return static_cast<std::uint8_t>(sign | field);
}

template <class A>
void int8_gemm(const Int8Gemm& p) {
  const A* x = static_cast<const A*>(p.a);
  const auto* y = static_cast<const std::int8_t*>(p.b);
  auto* z = static_cast<std::int32_t*>(p.out);
  const std::int64_t m = p.m, n = p.n, k = p.k;
  const std::int64_t xr = p.a_row, xc = p.a_col, yr = p.b_row, yc = p.b_col, zr = p.out_row, zc = p.out_col;
#pragma omp parallel for if (m * n * k > 32768)
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      std::uint32_t sum = 0;  // wraps around
      if (xc == 1 && yr == 1) {
        for (std::int64_t c = 0; c < k; ++c) {
          sum += static_cast<std::uint32_t>(std::int32_t{x[i * xr + c]} * std::int32_t{y[j * yc + c]});
        }
      } else {
        for (std::int64_t c = 0; c < k; ++c) {
          sum += static_cast<std::uint32_t>(std::int32_t{x[i * xr + c * xc]} * std::int32_t{y[c * yr + j * yc]});
        }
      }
      z[i * zr + j * zc] = static_cast<std::int32_t>(sum);
    }
  }
}

}  // namespace

void gemm_int8(const Int8Gemm& p, DType a_dtype) {
  if (a_dtype == DType::kInt8) return int8_gemm<std::int8_t>(p);
  return int8_gemm<std::uint8_t>(p);
}

void scale_columns(std::int64_t m, std::int64_t n, const float* scales, float* values) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) values[i * n + j] *= scales[j];
  }
}

void scale_epilogue(const ScaleEpilogue& p) {
  float* value = p.values;
  for (std::int64_t i = 0; i < p.m; ++i) {
    const float row = p.row[i * p.row_stride];
    for (std::int64_t j = 0; j < p.n; ++j, ++value) {
      *value *= row * p.column[j * p.column_stride];
      if (p.bias != nullptr) *value += p.bias[j];
      *value /= p.divisor;
    }
  }
}

void float8_to_float(const Matrix& from, float* to) {
  float table[256];
  for (int i = 0; i < 256; ++i) table[i] = decode(format_of(from.dtype), static_cast<std::uint8_t>(i));
  const auto* const bits = static_cast<const std::uint8_t*>(from.data);
  for (std::int64_t i = 0; i < from.rows; ++i) {
    for (std::int64_t j = 0; j < from.cols; ++j) *to++ = table[bits[i * from.row_stride + j * from.col_stride]];
  }
}

void float_to_float8(std::int64_t count, const float* from, DType dtype, void* to) {
  auto* const bits = static_cast<std::uint8_t*>(to);
  for (std::int64_t i = 0; i < count; ++i) bits[i] = encode(format_of(dtype), from[i]);
}

}  // namespace untorch::kernels::cpu
