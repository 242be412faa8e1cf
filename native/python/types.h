// The element types, and messages about arguments: what the files that convert arrays share.
#pragma once

#include <Python.h>
#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/ndarraytypes.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "dlpack.h"
#include "python_api.h"

namespace untorch::python {

// PyTorch's ScalarType codes and what numpy and DLPack call the same types.
struct TypeRow {
  std::int32_t code;
  const char* name;
  int numpy;  // NPY_NOTYPE: numpy has none; ml_dtypes may
  std::uint8_t dl_code, bits;
  const char* typestr;  // null: there is none
};
inline constexpr TypeRow kTypes[] = {
    {0, "uint8", NPY_UINT8, kDLUInt, 8, "|u1"},
    {1, "int8", NPY_INT8, kDLInt, 8, "|i1"},
    {2, "int16", NPY_INT16, kDLInt, 16, "<i2"},
    {3, "int32", NPY_INT32, kDLInt, 32, "<i4"},
    {4, "int64", NPY_INT64, kDLInt, 64, "<i8"},
    {5, "float16", NPY_FLOAT16, kDLFloat, 16, "<f2"},
    {6, "float32", NPY_FLOAT32, kDLFloat, 32, "<f4"},
    {7, "float64", NPY_FLOAT64, kDLFloat, 64, "<f8"},
    {9, "complex64", NPY_COMPLEX64, kDLComplex, 64, "<c8"},
    {10, "complex128", NPY_COMPLEX128, kDLComplex, 128, "<c16"},
    {11, "bool", NPY_BOOL, kDLBool, 8, "|b1"},
    {15, "bfloat16", NPY_NOTYPE, kDLBfloat, 16, nullptr},
    {23, "float8_e5m2", NPY_NOTYPE, 12, 8, nullptr},
    {24, "float8_e4m3fn", NPY_NOTYPE, 10, 8, nullptr},
    {25, "float8_e5m2fnuz", NPY_NOTYPE, 13, 8, nullptr},
    {26, "float8_e4m3fnuz", NPY_NOTYPE, 11, 8, nullptr},
    {27, "uint16", NPY_UINT16, kDLUInt, 16, "<u2"},
    {28, "uint32", NPY_UINT32, kDLUInt, 32, "<u4"},
    {29, "uint64", NPY_UINT64, kDLUInt, 64, "<u8"},
    {44, "float8_e8m0fnu", NPY_NOTYPE, 14, 8, nullptr},
};

inline const TypeRow* row_of(std::int32_t code) {
  for (const TypeRow& row : kTypes) {
    if (row.code == code) return &row;
  }
  return nullptr;
}

// Sets the Python exception for an argument that cannot be taken.
void raise_argument(const char* method, std::size_t index, const std::string& text);
// For an argument of another Python type: ArgumentTypeError, also a TypeError.
void raise_argument_type(const char* method, std::size_t index, const std::string& text);

}  // namespace untorch::python
