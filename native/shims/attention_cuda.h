// What the attention operators of CUDA share: results in the layout that a model expects, and the launch.
#pragma once

#include "kernels/attention.h"
#include "shims/attention_checks.h"

namespace untorch::shims::attention {

// Memory for a result that a model expects with these strides. Kernels write a row in one piece: where the last
// dimension is not dense it is contiguous, and `in_layout` copies the result to its place.
TensorPtr empty_result(const Dims& sizes, const Dims& strides, const Tensor& query);
TensorPtr in_layout(TensorPtr out, const Dims& strides);

// The problem but for its pointers: sizes, dtype, scale.
kernels::cuda::Attention problem(const Operands& in, const double* scale);
// Fills in the operands and the result and launches. Operands that the kernels cannot read in place (their last stride
// is not 1, or they are not aligned to 16 bytes) are copied first.
void launch(const OnDevice& on, const char* op, const Operands& in, const Tensor* bias, const Tensor& out,
            kernels::cuda::Attention problem);
// The random state of an operator without dropout: [2] and [] of uint64, one allocation. The kernel clears it.
struct RandomState {
  explicit RandomState(const OnDevice& on);
  TensorPtr state, unused;
};

}  // namespace untorch::shims::attention
