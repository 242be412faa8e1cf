// The first product of a mixture of experts: silu(gate) · up, rounded to x's dtype. And which kernel makes it.
#include "kernels/cuda/nvfp4_moe_mma.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_first(const Nvfp4Moe& p, Stream stream) {
  if (p.blocks == 0) return 0;
  if (p.dtype == Scalar::kFloat32) return nvfp4_moe_first_float(p, stream);
  return p.rows == kMoeWgmmaRows ? nvfp4_moe_first_wgmma(p, stream) : tile_product<true>(p, stream);
}

}  // namespace untorch::kernels::cuda
