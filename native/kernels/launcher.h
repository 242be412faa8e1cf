// What launchers of CUDA kernels take: raw pointers, PyTorch's dtype codes, a stream. No CUDA header is needed to
// include a launcher's header. Every launcher returns a cudaError_t as an int: 0 when the kernel was enqueued.
#pragma once

#include <cstdint>

#include "base/dtype.h"

struct CUstream_st;

namespace untorch::kernels::cuda {

using Stream = CUstream_st*;

// A launcher was given a dtype that it has no kernel for (cudaErrorInvalidValue).
inline constexpr int kNoKernel = 1;

}  // namespace untorch::kernels::cuda
