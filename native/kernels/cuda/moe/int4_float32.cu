// Int4 MoE grouped GEMM in float32: instances of moe_float32.cuh.
#include "kernels/cuda/moe/int4_format.cuh"
#include "kernels/cuda/moe/moe_float32.cuh"

namespace untorch::kernels::cuda {

int int4_moe_gate_up_float32(const Int4Moe& p, Stream stream) {
  return moe_gemm_float32<Int4MoeFormat, true>(p, stream);
}
int int4_moe_down_float32(const Int4Moe& p, Stream stream) { return moe_gemm_float32<Int4MoeFormat, false>(p, stream); }

}  // namespace untorch::kernels::cuda
