// NVFP4 MoE grouped GEMM in float32: instances of moe_float32.cuh.
#include "kernels/cuda/moe/moe_float32.cuh"
#include "kernels/cuda/moe/nvfp4_format.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_gate_up_float32(const Nvfp4Moe& p, Stream stream) {
  return moe_gemm_float32<Nvfp4MoeFormat, true>(p, stream);
}
int nvfp4_moe_down_float32(const Nvfp4Moe& p, Stream stream) {
  return moe_gemm_float32<Nvfp4MoeFormat, false>(p, stream);
}

}  // namespace untorch::kernels::cuda
