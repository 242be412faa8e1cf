// Int4 MoE grouped GEMM on sm_90a: instances of moe_gemm_sm90.cuh.
#include "kernels/cuda/moe/int4_format.cuh"
#include "kernels/cuda/moe/moe_gemm_sm90.cuh"

namespace untorch::kernels::cuda {

int int4_moe_gate_up_sm90(const Int4Moe& p, Stream stream) { return moe_gemm_sm90<Int4MoeFormat, true>(p, stream); }
int int4_moe_down_sm90(const Int4Moe& p, Stream stream) { return moe_gemm_sm90<Int4MoeFormat, false>(p, stream); }

}  // namespace untorch::kernels::cuda
