// nvfp4_moe: its arguments, and its implementation on CUDA (nvfp4_moe_cuda.cpp).
#pragma once

#include "cuda/on_device.h"
#include "shims/moe_arguments.h"
#include "tensor/tensor.h"

namespace untorch::shims {

struct Nvfp4MoeShape : MoeShape {
  bool two_scales = false;  // gate and up have a global scale each
  bool integers = false;    // w4a8_linear's layout, on the CPU alone
};

struct Nvfp4MoeArguments : MoeArguments {
  const Tensor &w13, &w13_scale, &w2, &w2_scale, &w13_global, &w2_global;
};

// Into `into`, or new memory where it is null.
TensorPtr nvfp4_moe_cuda(const char* op, const OnDevice& on, const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape,
                         const Tensor* into = nullptr);

}  // namespace untorch::shims
