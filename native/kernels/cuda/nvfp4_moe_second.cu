// The second product of a mixture of experts for half types: what each pair adds to its token, in float32.
#include "kernels/cuda/nvfp4_moe_tile.cuh"

namespace untorch::kernels::cuda {

int nvfp4_moe_second(const Nvfp4Moe& p, Stream stream) { return tile_product<false>(p, stream); }

}  // namespace untorch::kernels::cuda
