// The inner loop of channels-last maximum pooling: a compare and two masked moves an element, vectorised by the
// compiler; bound by L1 bandwidth.
#include "kernels/cpu/vision/pooling_rows.h"

namespace untorch::kernels::UNTORCH_ISA {

template <class T>
void max_channels(std::int64_t n, const T* __restrict from, std::int64_t here, T* __restrict best,
                  std::int64_t* __restrict at) {
#pragma omp simd
  for (std::int64_t i = 0; i < n; ++i) {
    const T value = from[i], old = best[i];
    const bool better = !(value <= old);  // also for a NaN value
    // The first NaN stays unless another NaN follows.
    const bool taken = better && (old == old || value != value);
    best[i] = taken ? value : old;
    at[i] = taken ? here : at[i];
  }
}

template void max_channels(std::int64_t, const float*, std::int64_t, float*, std::int64_t*);
template void max_channels(std::int64_t, const double*, std::int64_t, double*, std::int64_t*);

}  // namespace untorch::kernels::UNTORCH_ISA
