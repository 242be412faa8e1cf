// NVFP4 W4A16 GEMV, M up to 16: instances of w4a16_gemv.cuh.
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "kernels/cuda/w4a16/nvfp4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemv.cuh"

namespace untorch::kernels::cuda {

int nvfp4_gemv(const Nvfp4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > 16 || p.inner_k_tiles != 8) return kNoKernel;
  if (p.dtype == DType::kFloat16) return gemv_for_m<Nvfp4GemvFormat, __half, true>(p, stream);
  return p.dtype == DType::kBFloat16 ? gemv_for_m<Nvfp4GemvFormat, __nv_bfloat16, true>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
