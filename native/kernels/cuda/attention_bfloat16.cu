// Attention of bfloat16, without a bias: instances of attention_mma.cuh.
#include "kernels/cuda/attention_mma.cuh"

namespace untorch::kernels::cuda {

int attention_bfloat16(const Attention& problem, const AttentionPlan& plan, Stream stream) {
  return launch_attention<__nv_bfloat16>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
