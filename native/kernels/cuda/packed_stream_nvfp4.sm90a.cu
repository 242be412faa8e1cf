// Products of any number of rows with NVFP4 weights, by the tensor instructions of sm_90.
#include "kernels/cuda/nvfp4_scales.cuh"
#include "kernels/cuda/packed_stream.cuh"

namespace untorch::kernels::cuda {

std::size_t nvfp4_stream_workspace(const Nvfp4Gemm& p) { return stream_workspace(p); }

int nvfp4_stream(const Nvfp4Gemm& p, Stream stream) { return stream_packed_rows<Nvfp4Stream>(p, stream); }

}  // namespace untorch::kernels::cuda
