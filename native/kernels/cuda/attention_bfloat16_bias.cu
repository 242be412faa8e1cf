// Attention of bfloat16 with an additive bias (or a scale that is not positive): instances of attention_mma.cuh.
#include "kernels/cuda/attention_mma.cuh"

namespace untorch::kernels::cuda {

int attention_bfloat16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream) {
  return launch_attention_bias<__nv_bfloat16>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
