// NVFP4 MoE grouped GEMM on sm_90a: instances of moe_gemm_sm90.cuh.
#include "kernels/cuda/moe/moe_gemm_sm90.cuh"
#include "kernels/cuda/moe/nvfp4_format.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_gate_up_sm90(const Nvfp4Moe& p, Stream stream) { return moe_gemm_sm90<Nvfp4MoeFormat, true>(p, stream); }
int nvfp4_moe_down_sm90(const Nvfp4Moe& p, Stream stream) { return moe_gemm_sm90<Nvfp4MoeFormat, false>(p, stream); }

}  // namespace untorch::kernels::cuda
