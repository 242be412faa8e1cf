// The first product of a mixture of experts for half types: silu(gate) · up, rounded to x's dtype.
#include "kernels/cuda/nvfp4_moe_tile.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_first(const Nvfp4Moe& p, Stream stream) { return tile_product<true>(p, stream); }

}  // namespace untorch::kernels::cuda
