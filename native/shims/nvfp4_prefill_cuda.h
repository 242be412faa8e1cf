// nvfp4_linear at large M with quantized activations, on CUDA: W8A8 in FP8, and W4A4 in NVFP4, by cuBLASLt.
#pragma once

#include "cuda/on_device.h"
#include "kernels/cuda/w4a16/nvfp4.h"
#include "kernels/nvfp4_prefill.h"

namespace untorch::shims {

// Throws kUnsupported where the GPU cannot serve `prefill`, whatever M: a long prompt should not be the first to fail.
void check_prefill_gpu(const char* op, kernels::Nvfp4Prefill prefill, const OnDevice& on);

// W8A8: rows of x and of the weight in FP8 with a scale each, accumulation in float32.
void nvfp4_linear_fp8(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                      bool fast_accumulation);

// W4A4: x in NVFP4 like the weight, with a float32 scale for each row.
void nvfp4_linear_fp4(const char* op, const OnDevice& on, const kernels::cuda::Nvfp4Gemm& p, const Tensor& out,
                      bool emulated);

}  // namespace untorch::shims
