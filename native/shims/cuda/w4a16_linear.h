// What linear layers with packed weights of four bits, int4 and NVFP4, share on CUDA.
#pragma once

#include <functional>

#include "kernels/cuda/w4a16/problem.h"
#include "shims/cuda/shim.h"

namespace untorch::shims {

// What the environment sets for a benchmark or a test, or what is `otherwise`.
std::int64_t from_environment(const char* variable, std::int64_t otherwise);

// Throws kUnsupported where the kernels do not run; `weights` says of what.
void check_w4a16_gpu(const char* op, const char* weights, const OnDevice& on);

// The tensor, dense and aligned to the 16 bytes that kernels read at a time: another handle on it, or a copy.
TensorPtr aligned_cuda(const Tensor& tensor);

// x as rows at one distance: where, how wide and how far apart, all of it as W4A16Gemm wants it. What the kernels
// cannot read is copied, with zeros behind; for cuBLAS, too, which is slower with such rows and rounds twice where
// there is a bias. k is the weight's: rows do not become wider. apart: rows do not overlap either, which cuBLAS and
// copies by boxes do not take.
struct W4A16Activations {
  TensorPtr tensor;
  std::int64_t width = 0, stride = 0;
};
W4A16Activations w4a16_activations(const OnDevice& on, const Tensor& x, std::int64_t m, std::int64_t k,
                                   std::int64_t x_width, bool apart);

// What kernels choose by.
void describe_gpu(const OnDevice& on, kernels::cuda::W4A16Gemm& p);

// The whole matrix that the loader left beside a packed weight (shims/unpack.h), if it is [n, k] in `dtype` and of
// these scales; else null.
const Tensor* dequantized_weight(const Tensor& weight, DType dtype, std::int64_t n, std::int64_t k,
                                 const Tensor& scales, const Tensor* more_scales = nullptr);
// A new tensor [n, k] for one, outside the pool.
TensorPtr empty_dequantized(const char* op, const OnDevice& on, DType dtype, std::int64_t n, std::int64_t k);

// The product by cuBLASLt with such a matrix. `bias`, dense, is what p.bias points at, or both are null.
void gemm_dequantized(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                      const Tensor* bias, const Tensor& whole);

// The product by cuBLASLt, whose weight is unpacked by `unpack` (first, columns, to): `chunk` columns at a time, one
// after the other in the same scratch. `bias` as above.
void gemm_dequantize_chunks(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                            const Tensor* bias, std::int64_t chunk,
                            const std::function<int(std::int64_t, std::int64_t, void*)>& unpack);

}  // namespace untorch::shims
