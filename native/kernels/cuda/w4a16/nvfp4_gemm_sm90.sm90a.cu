// NVFP4 W4A16 GEMM on sm_90a: instances of w4a16_gemm_sm90.cuh.
#include "kernels/cuda/w4a16/nvfp4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemm_sm90.cuh"

namespace untorch::kernels::cuda {

std::size_t nvfp4_gemm_sm90_workspace(const Nvfp4Gemm& p) { return gemm_sm90_workspace(p); }

int nvfp4_gemm_sm90(const Nvfp4Gemm& p, Stream stream) { return gemm_sm90<Nvfp4Sm90Format>(p, stream); }

}  // namespace untorch::kernels::cuda
