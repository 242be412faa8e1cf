// Convolution by cuDNN 9, opened at run time.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "cuda/driver.h"
#include "kernels/convolution.h"

namespace untorch::cuda {

struct DnnConvolution {
  kernels::ConvolutionShape shape;
  DType dtype;  // float16, bfloat16, float32 or float64, of all tensors
  bool transposed;
  bool tf32;                            // float32 operands may be rounded to TF32
  bool bias = false, residual = false;  // added in the same kernel
  bool relu = false;                    // after the sums
  std::string_view plan = {};           // what dnn_tune gave; ignored where it is of another GPU, cuDNN or size

  bool fused() const noexcept { return bias || residual || relu; }
};

struct DnnOperands {
  const void *input, *weight;
  void* output;
  const void *bias = nullptr, *residual = nullptr;  // where the problem has them; residual is laid out like output
};

// output = relu(input ∗ weight + bias + residual). Tensors are dense: row-major, or with the channel innermost (weight
// too: [out, kernel…, in]) when shape.channels_last. True when it was enqueued; false when cuDNN has no deterministic
// algorithm for the problem, or for a fused one none that is compiled already. Throws kUnsupported when there is no
// cuDNN, and kInternal when it fails.
bool dnn_convolution(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream);

// Times the algorithms that cuDNN has for the problem with these operands, and waits for them. The plan of the fastest,
// "cudnn=91900 gpu=NVIDIA H200 input=2x1x56x56 fused algorithm=3"; empty where there are not two.
struct DnnTuning {
  std::string plan;
  double first_us = 0, best_us = 0;  // of cuDNN's own choice, and of the fastest
};
DnnTuning dnn_tune(const DnnConvolution& problem, const DnnOperands& operands, int device, Stream stream);

}  // namespace untorch::cuda
