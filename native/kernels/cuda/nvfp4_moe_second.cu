// The second product of a mixture of experts: what each pair adds to its token, in float32. And which
// kernel makes it.
#include "kernels/cuda/nvfp4_moe_mma.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_second(const Nvfp4Moe& p, Stream stream) {
  if (p.blocks == 0) return 0;
  if (p.dtype == Scalar::kFloat32) return nvfp4_moe_second_float(p, stream);
  return p.rows == kMoeWgmmaRows ? nvfp4_moe_second_wgmma(p, stream) : tile_product<false>(p, stream);
}

}  // namespace untorch::kernels::cuda
