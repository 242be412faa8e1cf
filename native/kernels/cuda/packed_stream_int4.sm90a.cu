// Products of any number of rows with int4 weights, by the tensor instructions of sm_90.
#include "kernels/cuda/int4_scales.cuh"
#include "kernels/cuda/packed_stream.cuh"

namespace untorch::kernels::cuda {

std::size_t int4_stream_workspace(const Int4Gemm& p) { return stream_workspace(p); }

int int4_stream(const Int4Gemm& p, Stream stream) {
  if (p.group >= kPackedBlockK) return stream_packed_rows<Int4Stream<1>>(p, stream);
  return p.group == 64 ? stream_packed_rows<Int4Stream<2>>(p, stream) : stream_packed_rows<Int4Stream<4>>(p, stream);
}

}  // namespace untorch::kernels::cuda
