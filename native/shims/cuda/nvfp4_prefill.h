// Products of many rows with NVFP4 weights in arithmetic that the caller asks for, on CUDA.
#pragma once

#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/nvfp4_prefill.h"
#include "shims/cuda/shim.h"

namespace untorch::shims {

// Throws kUnsupported where the GPU cannot do what is asked for, with any number of rows: a long prompt should not be
// the first to fail.
void check_prefill_gpu(const char* op, kernels::Nvfp4Prefill prefill, const OnDevice& on);

// The product in float8: rows of x and of the weight with a scale each, sums in float32.
void multiply_nvfp4_float8(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                           bool fast_accumulation);

// The product of two NVFP4 operands: x in blocks of 16 like the weight, with a float32 scale for each row.
void multiply_nvfp4_float4(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                           bool emulated);

}  // namespace untorch::shims
