// GEMM of CUDA tensors: our own kernels or cuBLASLt, and copies of what neither reads in place.
#pragma once

#include "kernels/cuda/gemm/small_m.h"
#include "shims/gemm.h"

namespace untorch::shims {

// out = activation(alpha · a · b + beta · added). a and b have one dtype, float64, float32, bfloat16 or float16; out
// has it too, or is float32 for half operands. Half types are summed in float32.
struct CudaGemm {
  kernels::Matrix a, b, out;
  std::optional<kernels::Matrix> added;  // of out's dtype and shape; may be out; not read when beta is 0
  double alpha = 1.0, beta = 1.0;
  kernels::cuda::Activation activation = kernels::cuda::Activation::kNone;
};
// `added`, which may be null, broadcasts to out.
CudaGemm gemm_problem(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* added, double alpha,
                      double beta);
void gemm_cuda(const char* op, const OnDevice& on, const CudaGemm& problem);

// int8 [m, k] · int8 [k, n] into int32.
void int8_gemm_cuda(const char* op, const OnDevice& on, const Tensor& a, const Tensor& b, const Tensor& out);
// x [m, k] · int8 weight [n, k]ᵀ · scales [n], all dense.
void w8a16_gemm_cuda(const char* op, const OnDevice& on, const Tensor& x, const Tensor& weight, const Tensor& scales,
                     const Tensor& out);
// Into a dense `out`, 16-byte aligned.
void scaled_gemm_cuda(const char* op, const OnDevice& on, const ScaledGemm& s, const Tensor& out);

}  // namespace untorch::shims
