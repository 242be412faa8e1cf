// Binary search, a thread a value: log2(n) dependent loads, which neighbouring threads mostly share in L1 and L2.
//
// Roofline: bound by the latency of those loads; values read and positions written once, coalesced.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/search.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads)
    search_values(const T* sorted, std::int64_t n, const T* values, std::int64_t total, std::int64_t per_row,
                  const std::int64_t* sorter, bool right, void* out, bool out_int32) {
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t start = per_row == total ? 0 : i / per_row * n;
    const Compute<T> wanted = widen(values[i]);
    std::int64_t low = 0, high = n;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      std::int64_t from = middle;
      if (sorter != nullptr) {
        from = sorter[start + middle];
        from = from < 0 ? 0 : from >= n ? n - 1 : from;
      }
      const Compute<T> there = widen(sorted[start + from]);
      if (right ? there > wanted : there >= wanted)
        high = middle;
      else
        low = middle + 1;
    }
    if (out_int32)
      static_cast<std::int32_t*>(out)[i] = static_cast<std::int32_t>(low);
    else
      static_cast<std::int64_t*>(out)[i] = low;
  }
}

}  // namespace

int search(const SearchParams& params, Stream stream) {
  if (params.total == 0) return 0;
  return dispatch_real(params.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    search_values<<<blocks_for(params.total, kThreads), kThreads, 0, stream>>>(
        static_cast<const T*>(params.sorted), params.n, static_cast<const T*>(params.values), params.total,
        params.per_row, params.sorter, params.right, params.out, params.out_int32);
    return cudaGetLastError();
  });
}

}  // namespace untorch::kernels::cuda
