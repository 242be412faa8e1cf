// Convolution by cuDNN 9, opened at run time.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/driver.h"
#include "kernels/convolution.h"

namespace untorch::cuda {

struct DnnConvolution {
  kernels::ConvolutionShape shape;
  DType dtype;  // float16, bfloat16, float32 or float64, of all three tensors
  bool transposed;
  bool tf32;  // float32 operands may be rounded to TF32
};

// output = input ∗ weight, without a bias. Tensors are dense: row-major, or with the channel innermost (weight too:
// [out, kernel…, in]) when shape.channels_last. True when it was enqueued; false when cuDNN has no deterministic
// algorithm for the problem. Throws kUnsupported when there is no cuDNN, and kInternal when it fails.
bool dnn_convolution(const DnnConvolution& problem, const void* input, const void* weight, void* output, int device,
                     Stream stream);

}  // namespace untorch::cuda
