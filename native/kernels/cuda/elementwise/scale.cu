// In-place scaling by a grid-stride loop over dense memory.
//
// Roofline: bytes = read + write of every element, one multiplication each: bound by DRAM. Its share has not been
// measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/scale.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) multiply(std::int64_t count, T factor, T* data) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += step) data[i] *= factor;
}

}  // namespace

int scale(std::int64_t count, double factor, DType dtype, void* data, Stream stream) {
  if (count == 0) return 0;
  const unsigned blocks = blocks_for(count, kThreads);
  if (dtype == DType::kFloat32) {
    multiply<<<blocks, kThreads, 0, stream>>>(count, static_cast<float>(factor), static_cast<float*>(data));
  } else if (dtype == DType::kFloat64) {
    multiply<<<blocks, kThreads, 0, stream>>>(count, factor, static_cast<double*>(data));
  } else {
    return kNoKernel;
  }
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
