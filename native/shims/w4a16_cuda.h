// Shared by W4A16 linear layers on CUDA, int4 and NVFP4: operands, the GPU's features, dequantize + cuBLASLt.
#pragma once

#include <functional>

#include "cuda/on_device.h"
#include "kernels/cuda/w4a16/problem.h"
#include "tensor/tensor.h"

namespace untorch::shims {

// The value of an environment variable, which a benchmark or a test sets, or `otherwise`.
std::int64_t from_environment(const char* variable, std::int64_t otherwise);

// Throws kUnsupported where the kernels do not run; `weights` names the format.
void check_w4a16_gpu(const char* op, const char* weights, const OnDevice& on);

// The tensor, dense and aligned to the 16 bytes that kernels load: another handle on it, or a copy.
TensorPtr aligned_cuda(const Tensor& tensor);

// Activations as W4A16Gemm takes them: rows at one stride. What the kernels cannot read is copied, padded along K with
// zeros; for cuBLAS, too, which is slower with such rows and rounds twice where there is a bias. k is the weight's:
// rows do not become wider. disjoint_rows: copy rows that overlap as well, which cuBLAS and tensor maps do not take.
struct W4A16Activations {
  TensorPtr tensor;
  std::int64_t width = 0, stride = 0;
};
W4A16Activations w4a16_activations(const OnDevice& on, const Tensor& x, std::int64_t m, std::int64_t k,
                                   std::int64_t x_width, bool disjoint_rows);

// Sets what the heuristics choose by.
void describe_gpu(const OnDevice& on, kernels::cuda::W4A16Gemm& p);

// The dequantized copy that the loader left beside a packed weight, if it is [n, k] in `dtype` and of these scales;
// else null.
const Tensor* dequantized_weight(const Tensor& weight, DType dtype, std::int64_t n, std::int64_t k,
                                 const Tensor& scales, const Tensor* more_scales = nullptr);
// A new tensor [n, k] for one, outside the pool.
TensorPtr empty_dequantized(const char* op, const OnDevice& on, DType dtype, std::int64_t n, std::int64_t k);

// The GEMM by cuBLASLt with a dequantized weight. `bias`, dense, is what p.bias points at, or both are null.
void gemm_dequantized(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                      const Tensor* bias, const Tensor& dequantized);

// The GEMM by cuBLASLt, chunk after chunk: `dequantize` (n0, n, to) writes `chunk` columns at a time to one scratch
// buffer. `bias` as above.
void gemm_dequantize_chunks(const char* op, const OnDevice& on, const kernels::cuda::W4A16Gemm& p, const Tensor& out,
                            const Tensor* bias, std::int64_t chunk,
                            const std::function<int(std::int64_t, std::int64_t, void*)>& dequantize);

}  // namespace untorch::shims
