// Int4 W4A16 GEMM on sm_90a: instances of w4a16_gemm_sm90.cuh, by group size.
#include "kernels/cuda/w4a16/int4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemm_sm90.cuh"

namespace untorch::kernels::cuda {

std::size_t int4_gemm_sm90_workspace(const Int4Gemm& p) { return gemm_sm90_workspace(p); }

int int4_gemm_sm90(const Int4Gemm& p, Stream stream) {
  if (p.group >= kW4A16BlockK) return gemm_sm90<Int4Sm90Format<1>>(p, stream);
  return p.group == 64 ? gemm_sm90<Int4Sm90Format<2>>(p, stream) : gemm_sm90<Int4Sm90Format<4>>(p, stream);
}

}  // namespace untorch::kernels::cuda
