// Products of at most 16 rows with int4 weights.
#include "kernels/cuda/int4_choice.h"
#include "kernels/cuda/int4_scales.cuh"
#include "kernels/cuda/packed_narrow.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
int narrow_of(const Int4Gemm& p, Stream stream) {
  if (p.inner_k_tiles != 8) return narrow_of_rows<Int4Narrow<4>, T, false>(p, stream);
  return p.group >= kPackedBlockK ? narrow_of_rows<Int4Narrow<1>, T, true>(p, stream)
                                  : narrow_of_rows<Int4Narrow<4>, T, true>(p, stream);
}

}  // namespace

int int4_narrow(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.m > 16) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return narrow_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? narrow_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
