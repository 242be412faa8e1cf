// Products of at most 16 rows with NVFP4 weights.
#include "kernels/cuda/nvfp4_choice.h"
#include "kernels/cuda/nvfp4_scales.cuh"
#include "kernels/cuda/packed_narrow.cuh"

namespace untorch::kernels::cuda {

int nvfp4_narrow(const Nvfp4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > 16 || p.inner_k_tiles != 8) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return narrow_of_rows<Nvfp4Narrow, __half, true>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? narrow_of_rows<Nvfp4Narrow, __nv_bfloat16, true>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
