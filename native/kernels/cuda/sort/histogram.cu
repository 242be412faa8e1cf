// Histograms over equal bins: shared-memory counters a CTA, added to global ones, where the bins fit (8192); global
// atomics otherwise. Where the range is that of the values, a first pass reduces minima and maxima.
//
// Roofline: memory-bound; the values read once, twice when the range is theirs. Counts are integers, so the result is
// the same every time.
#include "kernels/cuda/common/integers.cuh"
#include "kernels/search.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kRangeCtas = 512;
constexpr std::int64_t kSharedBins = 8192;

// What the range and the bins are computed in: 64 bits for integers.
template <class T>
struct Values {
  using Wide = Compute<T>;
  const T* data;
  __device__ Wide operator[](std::int64_t i) const { return widen(data[i]); }
};
struct IntegerValues {
  using Wide = std::int64_t;
  const void* data;
  DType dtype;
  __device__ Wide operator[](std::int64_t i) const { return static_cast<Wide>(load_integer(data, i, dtype)); }
};

template <class W>
struct Range {
  W low, high;
};

template <class W>
__device__ __forceinline__ bool is_nan(W value) {
  return value != value;
}

// NaN wins on both sides.
template <class W>
__device__ __forceinline__ Range<W> join(const Range<W>& a, const Range<W>& b) {
  return {is_nan(a.low) || a.low < b.low ? a.low : b.low, is_nan(a.high) || a.high > b.high ? a.high : b.high};
}

template <class W>
__device__ Range<W> join_cta(Range<W> mine) {
  __shared__ Range<W> all[kThreads];
  all[threadIdx.x] = mine;
  __syncthreads();
  for (unsigned half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) all[threadIdx.x] = join(all[threadIdx.x], all[threadIdx.x + half]);
    __syncthreads();
  }
  return all[0];
}

template <class V, class W>
__global__ void __launch_bounds__(kThreads) find_ranges(V values, std::int64_t n, Range<W>* ranges) {
  const W start = values[0];
  Range<W> mine{start, start};
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads) {
    const W value = values[i];
    mine = join(mine, {value, value});
  }
  mine = join_cta(mine);
  if (threadIdx.x == 0) ranges[blockIdx.x] = mine;
}

// ranges[0] = what the bins span: the given range, or the join of `ctas` ranges.
template <class W>
__global__ void __launch_bounds__(kThreads) set_range(Range<W>* ranges, unsigned ctas, Range<W> given) {
  Range<W> mine = given;
  if (ctas != 0) {
    mine = ranges[threadIdx.x < ctas ? threadIdx.x : 0];
    for (unsigned b = threadIdx.x; b < ctas; b += kThreads) mine = join(mine, ranges[b]);
    mine = join_cta(mine);  // every thread has read its ranges
  }
  if (threadIdx.x != 0) return;
  if (mine.low == mine.high) {
    mine.low -= 1;
    mine.high += 1;
  }
  ranges[0] = mine;
}

template <class V, class W>
__global__ void __launch_bounds__(kThreads)
    count_bins(V values, std::int64_t n, std::int64_t bins, const Range<W>* range, unsigned long long* counts) {
  __shared__ unsigned local[kSharedBins];
  const W low = range->low, high = range->high;
  const bool shared = bins <= kSharedBins;
  if (shared) {
    for (int b = static_cast<int>(threadIdx.x); b < bins; b += kThreads) local[b] = 0;
    __syncthreads();
  }
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * kThreads) {
    const W value = values[i];
    if (!(value >= low && value <= high)) continue;
    auto bin = static_cast<std::int64_t>((value - low) * static_cast<W>(bins) / (high - low));
    // The last bin holds its upper edge; a range that is not finite gives no bin, and NaN in the end.
    if (bin >= bins) bin = bins - 1;
    if (bin < 0) bin = 0;
    if (shared)
      atomicAdd(&local[bin], 1u);
    else
      atomicAdd(&counts[bin], 1ull);
  }
  if (!shared) return;
  __syncthreads();
  for (int b = static_cast<int>(threadIdx.x); b < bins; b += kThreads) {
    if (local[b] != 0) atomicAdd(&counts[b], static_cast<unsigned long long>(local[b]));
  }
}

template <class T, class W>
__global__ void __launch_bounds__(kThreads)
    write_counts(const unsigned long long* counts, std::int64_t bins, const Range<W>* range, T* out, DType out_dtype) {
  for (std::int64_t b = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; b < bins;
       b += std::int64_t{gridDim.x} * kThreads) {
    if constexpr (std::is_same_v<W, std::int64_t>) {
      store_integer(out, b, out_dtype, counts[b]);
    } else {
      const bool finite = isfinite(range->low) && isfinite(range->high);
      out[b] = narrow<T>(finite ? static_cast<W>(counts[b]) : static_cast<W>(NAN));
    }
  }
}

template <class T, class V>
int run(V values, const HistogramParams& params, void* scratch, Stream stream) {
  using W = typename V::Wide;
  const std::int64_t n = params.n, bins = params.bins;
  auto* const ranges = static_cast<Range<W>*>(scratch);
  auto* const counts = reinterpret_cast<unsigned long long*>(static_cast<char*>(scratch) + kRangeCtas * 16);
  if (const int code = cudaMemsetAsync(counts, 0, static_cast<std::size_t>(bins) * 8, stream); code != 0) return code;
  const Range<W> given{static_cast<W>(params.min), static_cast<W>(params.max)};
  unsigned ctas = 0;
  if (given.low == given.high && n > 0) {
    ctas = blocks_for(n, 8 * kThreads);
    if (ctas > kRangeCtas) ctas = kRangeCtas;
    find_ranges<<<ctas, kThreads, 0, stream>>>(values, n, ranges);
  }
  set_range<<<1, kThreads, 0, stream>>>(ranges, ctas, given);
  if (n > 0) {
    unsigned grid = blocks_for(n, 8 * kThreads);
    if (grid > 1024) grid = 1024;
    count_bins<<<grid, kThreads, 0, stream>>>(values, n, bins, ranges, counts);
  }
  write_counts<<<blocks_for(bins, kThreads), kThreads, 0, stream>>>(counts, bins, ranges, static_cast<T*>(params.out),
                                                                    params.dtype);
  return cudaGetLastError();
}

}  // namespace

std::size_t histogram_scratch(std::int64_t bins) { return kRangeCtas * 16 + static_cast<std::size_t>(bins) * 8; }

int histogram(const HistogramParams& params, void* scratch, Stream stream) {
  if (is_integer(params.dtype))
    return run<std::uint8_t>(IntegerValues{params.values, params.dtype}, params, scratch, stream);
  return dispatch_floating(params.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    return run<T>(Values<T>{static_cast<const T*>(params.values)}, params, scratch, stream);
  });
}

}  // namespace untorch::kernels::cuda
