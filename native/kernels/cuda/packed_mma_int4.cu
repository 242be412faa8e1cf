// Products of some dozens of rows with int4 weights.
#include "kernels/cuda/int4_scales.cuh"
#include "kernels/cuda/packed_mma.cuh"

namespace untorch::kernels::cuda {
namespace {

static_assert(shared_bytes<Int4Tile, 128>() == kPackedSharedOf128 && shared_bytes<Int4Tile, 64>() == kPackedSharedOf64);

template <class T>
int mma_of(const Int4Gemm& p, Stream stream) {
  return p.inner_k_tiles == 8 ? mma_of_rows<Int4Tile, T, true>(p, stream) : mma_of_rows<Int4Tile, T, false>(p, stream);
}

}  // namespace

std::size_t int4_mma_workspace(const Int4Gemm& p) { return mma_workspace(p); }

int int4_mma(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.dtype == Scalar::kFloat16) return mma_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? mma_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
