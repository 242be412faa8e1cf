// Segment reductions. Bytes: the data once and the result. With 32 or more elements within the axis a thread takes one
// result and neighbouring threads read neighbours; else a warp takes one and its lanes share the segment. The order of
// additions depends on the shape and the segments alone. Halves are reduced in float.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/reduce/segment_reduce.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Bounds {
  std::int64_t begin, end;
};

// Cuts that leave the axis are brought into it.
__device__ __forceinline__ Bounds bounds_of(const SegmentJob& job, std::int64_t outer, std::int64_t segment) {
  const std::int64_t row = job.segments + (job.offsets ? 1 : 0);
  const std::int64_t* const cuts = job.cuts + outer * row;
  Bounds out;
  if (job.offsets)
    out = {cuts[segment], cuts[segment + 1]};
  else
    out = {segment == 0 ? 0 : cuts[segment - 1], cuts[segment]};
  const auto inside = [&](std::int64_t at) { return at < 0 ? 0 : at > job.extent ? job.extent : at; };
  return {inside(out.begin), inside(out.end)};
}

template <class W>
__device__ __forceinline__ W start_of(SegmentReduce reduce) {
  switch (reduce) {
    case SegmentReduce::kProd:
      return 1;
    case SegmentReduce::kAMax:
      return -static_cast<W>(INFINITY);
    case SegmentReduce::kAMin:
      return static_cast<W>(INFINITY);
    default:
      return 0;
  }
}

// NaN wins in the extrema.
template <class W>
__device__ __forceinline__ W combine(SegmentReduce reduce, W a, W b) {
  switch (reduce) {
    case SegmentReduce::kProd:
      return a * b;
    case SegmentReduce::kAMax:
      return isnan(b) || a < b ? b : a;
    case SegmentReduce::kAMin:
      return isnan(b) || b < a ? b : a;
    default:
      return a + b;
  }
}

template <class W>
__device__ __forceinline__ W finish(const SegmentJob& job, W value, std::int64_t count) {
  if (job.has_initial) value = combine(job.reduce, static_cast<W>(job.initial), value);
  if (job.reduce != SegmentReduce::kMean) return value;
  if (count > 0) return value / static_cast<W>(count);
  return job.has_initial ? value : static_cast<W>(NAN);
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_by_thread(SegmentJob job, std::int64_t total) {
  using W = Compute<T>;
  const auto* const data = static_cast<const T*>(job.data);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t group = i / job.inner, within = i - group * job.inner;
    const std::int64_t outer = group / job.segments, segment = group - outer * job.segments;
    const Bounds bounds = bounds_of(job, outer, segment);
    W value = start_of<W>(job.reduce);
    for (std::int64_t j = bounds.begin; j < bounds.end; ++j) {
      value = combine(job.reduce, value, widen(data[(outer * job.extent + j) * job.inner + within]));
    }
    static_cast<T*>(job.out)[i] = narrow<T>(finish(job, value, bounds.end - bounds.begin));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_by_warp(SegmentJob job, std::int64_t total) {
  using W = Compute<T>;
  const auto* const data = static_cast<const T*>(job.data);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < total;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t group = i / job.inner, within = i - group * job.inner;
    const std::int64_t outer = group / job.segments, segment = group - outer * job.segments;
    const Bounds bounds = bounds_of(job, outer, segment);
    W value = start_of<W>(job.reduce);
    for (std::int64_t j = bounds.begin + lane; j < bounds.end; j += 32) {
      value = combine(job.reduce, value, widen(data[(outer * job.extent + j) * job.inner + within]));
    }
    for (int by = 16; by > 0; by /= 2) value = combine(job.reduce, value, __shfl_down_sync(0xffffffff, value, by));
    if (lane == 0) static_cast<T*>(job.out)[i] = narrow<T>(finish(job, value, bounds.end - bounds.begin));
  }
}

__global__ void __launch_bounds__(kThreads) note_wrong(SegmentJob job, std::int64_t* wrong) {
  const std::int64_t row = job.segments + (job.offsets ? 1 : 0), total = job.outer * row;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t at = i % row, cut = job.cuts[i], before = at == 0 ? 0 : job.cuts[i - 1];
    const bool last = at == row - 1;
    if (cut < before || cut > job.extent || (last && !job.offsets && cut != job.extent)) *wrong = 1;
  }
}

}  // namespace

int segment_reduce(const SegmentJob& job, Stream stream) {
  const std::int64_t total = job.outer * job.segments * job.inner;
  if (total == 0) return 0;
  return dispatch_floating(job.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (job.inner >= 32) {
      reduce_by_thread<T><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(job, total);
    } else {
      reduce_by_warp<T><<<blocks_for(total, kWarps), kThreads, 0, stream>>>(job, total);
    }
    return cudaGetLastError();
  });
}

int check_segments(const SegmentJob& job, std::int64_t* wrong, Stream stream) {
  const std::int64_t total = job.outer * (job.segments + (job.offsets ? 1 : 0));
  if (total == 0) return 0;
  note_wrong<<<blocks_for(total, kThreads), kThreads, 0, stream>>>(job, wrong);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
