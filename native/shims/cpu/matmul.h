// Matrix products over tensors of any dtype: views, checks and the one entry that the operator files share.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// A matrix inside a tensor: its first element, sizes and strides in elements.
struct MatrixView {
  std::byte* data;
  std::int64_t rows, cols, row_stride, col_stride;
};

// The matrix of a 2-D tensor, and matrix `index` of a 3-D one.
MatrixView matrix_of(const Tensor& tensor);
MatrixView matrix_of(const Tensor& batch, std::int64_t index);

template <class T>
kernels::MatrixRef<T> typed(const MatrixView& view) {
  return {reinterpret_cast<T*>(view.data), view.row_stride, view.col_stride};
}

// C = beta·C + alpha·A·B for matrices of one dtype: floating, half (computed in float, rounded once), integer (wraps
// around) or complex. beta 0 does not read C. `serial` keeps it on the calling thread.
void multiply(const char* op, DType dtype, const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta,
              double alpha, bool serial = false);

// C[i] = beta·C[i] + alpha·A[i]·B[i] for 3-D tensors of one dtype; over the batch in parallel where that is better.
void multiply_batch(const char* op, const Tensor& a, const Tensor& b, const Tensor& c, double beta, double alpha);

// Writes `self`, broadcast, to `out`, unless they are the same view already. Throws when it does not broadcast.
void seed_out(const char* op, const Tensor& out, const Tensor& self);

// Activation by the name that a model library uses: none, relu, gelu, gelu_tanh, silu, tanh, sigmoid.
kernels::Activation activation_of(const char* op, const char* name);

}  // namespace untorch::shims
