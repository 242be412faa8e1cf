// What the operators of LAPACK share on any device: checks, batches, and matrices stored by columns.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

void check_matrix(const char* op, const char* argument, const Tensor& tensor);
void check_square(const char* op, const char* argument, const Tensor& tensor);
void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, DType dtype);
void check_ormqr(const char* op, const Tensor& v, const Tensor& tau, const Tensor& other, bool left);

inline DimSpan batch_of(const Tensor& tensor) { return DimSpan(tensor.sizes()).first(tensor.sizes().size() - 2); }
// The batch that two batches of matrices broadcast to.
Dims common_batch(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b);

Dims matrices(DimSpan batch, std::int64_t rows, std::int64_t columns);
// Uninitialised, every matrix stored by columns.
TensorPtr empty_by_columns(DimSpan batch, std::int64_t rows, std::int64_t columns, DType dtype, Device device = {});
// A copy that broadcasts to the batch, every matrix stored by columns.
TensorPtr copy_by_columns(const Tensor& from, DimSpan batch);
// Swaps the two last dimensions, a view.
TensorPtr transposed(const Tensor& tensor);

}  // namespace untorch::shims
