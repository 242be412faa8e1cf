// nvfp4_moe on CUDA: its weights, and the launches of moe_cuda.h.
#include "kernels/cuda/moe/nvfp4_moe.h"
#include "shims/destination.h"
#include "shims/moe_cuda.h"
#include "shims/nvfp4_arguments.h"
#include "shims/nvfp4_moe.h"

namespace untorch::shims {

TensorPtr nvfp4_moe_cuda(const char* op, const OnDevice& on, const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape,
                         const Tensor* into) {
  static const kernels::cuda::MoeThresholds thresholds = moe_thresholds("UNTORCH_NVFP4_MOE_SM80_MEAN");
  check_w4a16_gpu(op, "NVFP4", on);
  TensorPtr out = destination(op, into, Dims{shape.tokens, shape.k}, given.hidden_states.dtype(), on.device());
  if (out->numel() == 0) return out;
  const TensorPtr w13 = aligned_cuda(given.w13), w13_scale = aligned_cuda(given.w13_scale), w2 = aligned_cuda(given.w2),
                  w2_scale = aligned_cuda(given.w2_scale);
  kernels::cuda::Nvfp4Moe p;
  p.w13 = bytes_of(*w13), p.w13_scale = bytes_of(*w13_scale), p.w2 = bytes_of(*w2), p.w2_scale = bytes_of(*w2_scale);
  p.w13_global = given.w13_global.data<float>(), p.w2_global = given.w2_global.data<float>();
  p.two_scales = shape.two_scales;
  run_moe<kernels::cuda::Nvfp4Moe>(on, given, shape, *out, p, thresholds,
                                   {kernels::cuda::nvfp4_moe_gate_up, kernels::cuda::nvfp4_moe_down});
  return out;
}

}  // namespace untorch::shims
