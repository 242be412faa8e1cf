// Products of some dozens of rows with NVFP4 weights.
#include "kernels/cuda/nvfp4_scales.cuh"
#include "kernels/cuda/packed_mma.cuh"

namespace untorch::kernels::cuda {

std::size_t nvfp4_mma_workspace(const Nvfp4Gemm& p) { return mma_workspace(p); }

int nvfp4_mma(const Nvfp4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return mma_of_rows<Nvfp4Tile, __half, true>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? mma_of_rows<Nvfp4Tile, __nv_bfloat16, true>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
