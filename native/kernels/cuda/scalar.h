// What launchers of CUDA kernels take: raw pointers, PyTorch's dtype codes, a stream. No CUDA header is needed to
// include a launcher's header. Every launcher returns a cudaError_t as an int: 0 when the kernel was enqueued.
#pragma once

#include <cstdint>

struct CUstream_st;

namespace untorch::kernels::cuda {

using Stream = CUstream_st*;

// PyTorch's ScalarType codes (c10/core/ScalarType.h).
enum class Scalar : std::int8_t {
  kUInt8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kFloat32 = 6,
  kFloat64 = 7,
  kComplex64 = 9,
  kComplex128 = 10,
  kBool = 11,
  kBFloat16 = 15,
  kFloat8E5M2 = 23,
  kFloat8E4M3FN = 24,
  kUInt16 = 27,
  kUInt32 = 28,
  kUInt64 = 29,
};

// A launcher was given a dtype that it has no kernel for (cudaErrorInvalidValue).
inline constexpr int kNoKernel = 1;

}  // namespace untorch::kernels::cuda
