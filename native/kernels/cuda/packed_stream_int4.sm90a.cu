// Products of up to a thousand rows with int4 weights, by the tensor instructions of sm_90.
#include "kernels/cuda/int4_scales.cuh"
#include "kernels/cuda/packed_stream.cuh"

namespace untorch::kernels::cuda {

std::size_t int4_stream_workspace(const Int4Gemm& p) { return stream_workspace(p); }

int int4_stream(const Int4Gemm& p, Stream stream) {
  return p.group >= kPackedBlockK ? stream_packed_rows<Int4StreamLine>(p, stream)
                                  : stream_packed_rows<Int4Stream>(p, stream);
}

}  // namespace untorch::kernels::cuda
