// A barrier of all CTAs of a cooperative launch (cooperative_launch.cuh).
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

}  // namespace untorch::kernels::cuda
