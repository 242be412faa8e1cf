// Int4 W4A16 GEMM on sm_80: instances of w4a16_gemm_sm80.cuh.
#include "kernels/cuda/w4a16/int4_scales.cuh"
#include "kernels/cuda/w4a16/w4a16_gemm_sm80.cuh"

namespace untorch::kernels::cuda {
namespace {

static_assert(sm80_shared_bytes<Int4Sm80Format, 128>() == kSm80SharedBytesM128 &&
              sm80_shared_bytes<Int4Sm80Format, 64>() == kSm80SharedBytesM64);

template <class T>
int gemm_sm80_of(const Int4Gemm& p, Stream stream) {
  return p.inner_k_tiles == 8 ? gemm_sm80_for_m<Int4Sm80Format, T, true>(p, stream)
                              : gemm_sm80_for_m<Int4Sm80Format, T, false>(p, stream);
}

}  // namespace

std::size_t int4_gemm_sm80_workspace(const Int4Gemm& p) { return gemm_sm80_workspace(p); }

int int4_gemm_sm80(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.dtype == DType::kFloat16) return gemm_sm80_of<__half>(p, stream);
  return p.dtype == DType::kBFloat16 ? gemm_sm80_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
