// A barrier of all CTAs of a cooperative launch, and such launches.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Zero before the first launch. Each meeting adds kMeeting, whatever the number of CTAs, so that the next launch knows
// where it begins. Of launches that use the same one, only one may run at a time.
struct GridBarrier {
  static constexpr unsigned long long kMeeting = 1 << 16;  // more than CTAs of a launch
  unsigned long long arrived;
};

#if __CUDA_ARCH__ >= 900
// For one thread of a CTA. Constructed before it arrives for the first time, and behind the launch before.
class GridMeetings {
 public:
  __device__ __forceinline__ explicit GridMeetings(GridBarrier& barrier)
      : at_(&barrier.arrived), share_(blockIdx.x == 0 ? GridBarrier::kMeeting - (gridDim.x - 1) : 1) {
    next_ = value() / GridBarrier::kMeeting * GridBarrier::kMeeting;
  }
  // What this CTA's threads wrote before a __syncthreads in front of it, others see behind their wait, in loads that do
  // not go through L1 (__ldcg).
  __device__ __forceinline__ void arrive() {
    asm volatile("red.release.gpu.global.add.u64 [%0], %1;" ::"l"(at_), "l"(share_) : "memory");
    next_ += GridBarrier::kMeeting;
  }
  __device__ __forceinline__ void wait() const {
    while (value() < next_) {
    }
  }

 private:
  __device__ __forceinline__ unsigned long long value() const {
    unsigned long long now;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(now) : "l"(at_) : "memory");
    return now;
  }

  unsigned long long* at_;
  unsigned long long share_, next_;
};
#endif

// All CTAs are on the GPU at the same time, or the launch fails. pdl: as Launch::pdl.
template <class... Parameters, class... Arguments>
int launch_cooperative(void (*kernel)(Parameters...), int ctas, int threads, int shared_bytes, bool pdl, Stream stream,
                       const Arguments&... arguments) {
  const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (code != cudaSuccess) return code;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = pdl ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace untorch::kernels::cuda
