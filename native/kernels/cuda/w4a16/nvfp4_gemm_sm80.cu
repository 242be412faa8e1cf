// NVFP4 W4A16 GEMM on sm_80: instances of w4a16_gemm_sm80.cuh.
#include "kernels/cuda/w4a16/nvfp4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemm_sm80.cuh"

namespace untorch::kernels::cuda {

std::size_t nvfp4_gemm_sm80_workspace(const Nvfp4Gemm& p) { return gemm_sm80_workspace(p); }

int nvfp4_gemm_sm80(const Nvfp4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8) return kNoKernel;
  if (p.dtype == DType::kFloat16) return gemm_sm80_for_m<Nvfp4Sm80Format, __half, true>(p, stream);
  return p.dtype == DType::kBFloat16 ? gemm_sm80_for_m<Nvfp4Sm80Format, __nv_bfloat16, true>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
