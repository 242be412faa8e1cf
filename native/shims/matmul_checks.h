// The contract of GEMM operands, on any device.
#pragma once

#include <optional>

#include "shims/shim.h"

namespace untorch::shims {

// Throws unless the tensor has `dim` dimensions.
void check_rank(const char* op, const char* argument, const Tensor& tensor, std::int64_t dim);
// Throws unless a [.., m, k] and b [.., k, n] agree in k, batch and dtype.
void check_gemm_shapes(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b);
// Throws unless `out` has this dtype and shape.
void check_out(const char* op, const Tensor& out, DType dtype, DimSpan sizes);
// Throws unless `self`, which is added, has this dtype and broadcasts to this shape.
void check_added(const char* op, const Tensor& self, DType dtype, DimSpan sizes);

// Throws unless x is float32, bfloat16 or float16 and has a dense last dimension.
void check_float_rows(const char* op, const char* argument, const Tensor& x);
// Throws unless a dense tensor of this dtype and shape.
void check_is(const char* op, const char* argument, const Tensor& tensor, DType dtype, const Dims& sizes);
// Throws unless the bias has n elements of this dtype.
void check_bias(const char* op, const Tensor& bias, std::int64_t n, DType dtype);
// M of a linear layer: x's leading dimensions multiplied.
std::int64_t rows_before_last(const Tensor& x);

// How far apart the rows of x [.., k] lie when its leading dimensions are seen as one; empty when they do not fold into
// one stride. k for a single row.
std::optional<std::int64_t> row_stride_of(const Tensor& x);

// x in float32, its rows one stride apart: x itself where that is so.
struct FloatRows {
  TensorPtr tensor;
  std::int64_t stride;
};
FloatRows float_rows(const Tensor& x);

// A grouped GEMM: the sizes of one GEMM, and the result's (rows start at multiples of 16 bytes, as PyTorch's do).
struct GroupedShape {
  std::int64_t groups, m, n, k;  // m, n or k is that of all groups together where they divide it
  Dims out_sizes, out_strides;
};
// Throws unless the operands, the ends of the groups (null: two 3-D operands), the bias and the result's dtype are what
// _grouped_mm takes. The values of `offs` are not looked at.
GroupedShape check_grouped(const char* op, const Tensor& a, const Tensor& b, const Tensor* offs, bool has_bias,
                           DType out_dtype);

}  // namespace untorch::shims
