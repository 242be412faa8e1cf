// Int4 W4A16 GEMV, M up to 16: instances of w4a16_gemv.cuh.
#include "kernels/cuda/w4a16/int4_heuristic.h"
#include "kernels/cuda/w4a16/int4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemv.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
int gemv_of(const Int4Gemm& p, Stream stream) {
  if (p.inner_k_tiles != 8) return gemv_for_m<Int4GemvFormat<4>, T, false>(p, stream);
  return p.group >= kW4A16BlockK ? gemv_for_m<Int4GemvFormat<1>, T, true>(p, stream)
                                 : gemv_for_m<Int4GemvFormat<4>, T, true>(p, stream);
}

}  // namespace

int int4_gemv(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > 16) return kNoKernel;
  if (p.dtype == DType::kFloat16) return gemv_of<__half>(p, stream);
  return p.dtype == DType::kBFloat16 ? gemv_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
