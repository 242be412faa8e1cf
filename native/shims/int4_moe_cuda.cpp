// int4_moe on CUDA: its weights, and the launches of moe_cuda.h.
#include "shims/int4_moe.h"

#include "kernels/cuda/moe/int4_moe.h"
#include "shims/destination.h"
#include "shims/moe_cuda.h"

namespace untorch::shims {

TensorPtr int4_moe_cuda(const char* op, const OnDevice& on, const Int4MoeArguments& given, const Int4MoeShape& shape,
                        const Tensor* into) {
  static const kernels::cuda::MoeThresholds thresholds = moe_thresholds("UNTORCH_INT4_MOE_SM80_MEAN");
  check_w4a16_gpu(op, "int4", on);
  const DType dtype = given.hidden_states.dtype();
  TensorPtr out = destination(op, into, Dims{shape.tokens, shape.k}, dtype, on.device());
  if (out->numel() == 0) return out;
  const TensorPtr w13 = aligned_cuda(given.w13), w2 = aligned_cuda(given.w2),
                  w13_scales = aligned_cuda(*to_dtype(given.w13_scales, dtype)),
                  w2_scales = aligned_cuda(*to_dtype(given.w2_scales, dtype));
  kernels::cuda::Int4Moe p;
  p.w13 = w13->raw(), p.w13_scales = w13_scales->raw(), p.w13_k = shape.w13.k;
  p.w2 = w2->raw(), p.w2_scales = w2_scales->raw(), p.w2_k = shape.w2.k;
  p.group = shape.group;
  run_moe<kernels::cuda::Int4Moe>(on, given, shape, *out, p, thresholds,
                                  {kernels::cuda::int4_moe_gate_up, kernels::cuda::int4_moe_down});
  return out;
}

}  // namespace untorch::shims
