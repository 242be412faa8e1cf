// Element types: PyTorch's ScalarType codes, their names and sizes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace untorch {

// The codes are PyTorch's (c10::ScalarType); model libraries and the manifest hold them.
enum class DType : std::int32_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex32 = 8,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3FN = 24,
  kFloat8E5M2FNUZ = 25,
  kFloat8E4M3FNUZ = 26,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
  kFloat8E8M0FNU = 44,
  kFloat4E2M1FNx2 = 45,
};

// Bytes of one element; 0 for a code that is no known type.
std::size_t element_size(DType dtype) noexcept;
// "float32", "int64" …; "dtype(<code>)" for an unknown code.
std::string dtype_name(DType dtype);
// True for a code that element_size knows.
inline bool is_known(DType dtype) noexcept { return element_size(dtype) != 0; }
bool is_floating(DType dtype) noexcept;  // float16, bfloat16, float32, float64
bool is_integral(DType dtype) noexcept;  // signed and unsigned integers, not bool
bool is_complex(DType dtype) noexcept;

}  // namespace untorch
