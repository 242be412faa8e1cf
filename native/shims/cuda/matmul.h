// Matrix products of CUDA tensors: views, and the one entry that the operator files share.
#pragma once

#include "kernels/cuda/gemm/small_m.h"
#include "shims/cuda/shim.h"
#include "shims/matmul_checks.h"

namespace untorch::shims {

// A batch of matrices of one dtype in a tensor's memory; strides in elements, any of them.
struct CudaMatrix {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t batch = 1, rows = 0, cols = 0;
  std::int64_t batch_stride = 0, row_stride = 0, col_stride = 0;

  CudaMatrix transposed() const { return {data, dtype, batch, cols, rows, batch_stride, col_stride, row_stride}; }
};

// The matrix of a 2-D tensor, or the batch of a 3-D one.
CudaMatrix cuda_matrix(const Tensor& tensor);
// A tensor that broadcasts to [batch, rows, cols] (or to [rows, cols], with batch 1), as a matrix of that shape.
CudaMatrix cuda_matrix_broadcast(const Tensor& tensor, std::int64_t batch, std::int64_t rows, std::int64_t cols);

struct CudaProduct {
  CudaMatrix a, b, out;
  const CudaMatrix* added = nullptr;  // of out's dtype and shape; may be out; not read when beta is 0
  double alpha = 1.0, beta = 1.0;
  kernels::cuda::Activation activation = kernels::cuda::Activation::kNone;
};

// out = activation(alpha · a · b + beta · added). a and b have one dtype, float64, float32, bfloat16 or float16; out
// has it too, or is float32 for half operands. Half types are summed in float32.
void multiply(const char* op, const OnDevice& on, const CudaProduct& product);

// Throws kUnsupported for a dtype that multiply has no kernel for.
void check_multiply_dtype(const char* op, DType dtype);

// The matrices as a [batch, rows, cols] tensor over the same memory (borrowed), and a dense copy of them.
Tensor borrowed(const CudaMatrix& matrix, Device device);
TensorPtr dense_copy(const CudaMatrix& matrix, Device device);

}  // namespace untorch::shims
