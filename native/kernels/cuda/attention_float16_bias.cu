// Attention of float16 with an additive bias (or a scale that is not positive): instances of attention_mma.cuh.
#include "kernels/cuda/attention_mma.cuh"

namespace untorch::kernels::cuda {

int attention_float16_bias(const Attention& problem, const AttentionPlan& plan, Stream stream) {
  return launch_attention_bias<__half>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
