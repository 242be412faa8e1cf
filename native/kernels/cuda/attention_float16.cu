// Attention of float16, without a bias: instances of attention_mma.cuh.
#include "kernels/cuda/attention_mma.cuh"

namespace untorch::kernels::cuda {

int attention_float16(const Attention& problem, const AttentionPlan& plan, Stream stream) {
  return launch_attention<__half>(problem, plan, stream);
}

}  // namespace untorch::kernels::cuda
