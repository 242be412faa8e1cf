// Segmented reduction over contiguous segments of an axis.
//
//   data [outer, extent, inner]   inner >= 32: a thread a result, neighbours read neighbours;
//                                 else a warp a result, its lanes stride over the segment, then a shuffle tree
//
// Roofline: memory-bound; the data read once and the result written once. The order of additions depends on the shape
// and the segments alone. Halves are reduced in float.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/segment_reduce.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

struct Bounds {
  std::int64_t begin, end;
};

// Cuts that leave the axis are brought into it.
__device__ __forceinline__ Bounds bounds_of(const SegmentParams& params, std::int64_t outer, std::int64_t segment) {
  const std::int64_t row = params.segments + (params.offsets ? 1 : 0);
  const std::int64_t* const cuts = params.cuts + outer * row;
  Bounds out;
  if (params.offsets)
    out = {cuts[segment], cuts[segment + 1]};
  else
    out = {segment == 0 ? 0 : cuts[segment - 1], cuts[segment]};
  const auto inside = [&](std::int64_t at) { return at < 0 ? 0 : at > params.extent ? params.extent : at; };
  return {inside(out.begin), inside(out.end)};
}

template <class W>
__device__ __forceinline__ W start_of(ReduceOp reduce) {
  switch (reduce) {
    case ReduceOp::kProd:
      return 1;
    case ReduceOp::kMax:
      return -static_cast<W>(INFINITY);
    case ReduceOp::kMin:
      return static_cast<W>(INFINITY);
    default:
      return 0;
  }
}

// NaN wins in the extrema.
template <class W>
__device__ __forceinline__ W combine(ReduceOp reduce, W a, W b) {
  switch (reduce) {
    case ReduceOp::kProd:
      return a * b;
    case ReduceOp::kMax:
      return isnan(b) || a < b ? b : a;
    case ReduceOp::kMin:
      return isnan(b) || b < a ? b : a;
    default:
      return a + b;
  }
}

template <class W>
__device__ __forceinline__ W finish(const SegmentParams& params, W value, std::int64_t count) {
  if (params.has_initial) value = combine(params.reduce, static_cast<W>(params.initial), value);
  if (params.reduce != ReduceOp::kMean) return value;
  if (count > 0) return value / static_cast<W>(count);
  return params.has_initial ? value : static_cast<W>(NAN);
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_by_thread(SegmentParams params, std::int64_t total) {
  using W = Compute<T>;
  const auto* const data = static_cast<const T*>(params.data);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t group = i / params.inner, within = i - group * params.inner;
    const std::int64_t outer = group / params.segments, segment = group - outer * params.segments;
    const Bounds bounds = bounds_of(params, outer, segment);
    W value = start_of<W>(params.reduce);
    for (std::int64_t j = bounds.begin; j < bounds.end; ++j) {
      value = combine(params.reduce, value, widen(data[(outer * params.extent + j) * params.inner + within]));
    }
    static_cast<T*>(params.out)[i] = narrow<T>(finish(params, value, bounds.end - bounds.begin));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce_by_warp(SegmentParams params, std::int64_t total) {
  using W = Compute<T>;
  const auto* const data = static_cast<const T*>(params.data);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (std::int64_t i = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < total;
       i += std::int64_t{gridDim.x} * kWarps) {
    const std::int64_t group = i / params.inner, within = i - group * params.inner;
    const std::int64_t outer = group / params.segments, segment = group - outer * params.segments;
    const Bounds bounds = bounds_of(params, outer, segment);
    W value = start_of<W>(params.reduce);
    for (std::int64_t j = bounds.begin + lane; j < bounds.end; j += 32) {
      value = combine(params.reduce, value, widen(data[(outer * params.extent + j) * params.inner + within]));
    }
    for (int by = 16; by > 0; by /= 2) value = combine(params.reduce, value, __shfl_down_sync(0xffffffff, value, by));
    if (lane == 0) static_cast<T*>(params.out)[i] = narrow<T>(finish(params, value, bounds.end - bounds.begin));
  }
}

__global__ void __launch_bounds__(kThreads) note_wrong(SegmentParams params, std::int64_t* wrong) {
  const std::int64_t row = params.segments + (params.offsets ? 1 : 0), total = params.outer * row;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total;
       i += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t at = i % row, cut = params.cuts[i], before = at == 0 ? 0 : params.cuts[i - 1];
    const bool last = at == row - 1;
    if (cut < before || cut > params.extent || (last && !params.offsets && cut != params.extent)) *wrong = 1;
  }
}

}  // namespace

int segment_reduce(const SegmentParams& params, Stream stream) {
  const std::int64_t total = params.outer * params.segments * params.inner;
  if (total == 0) return 0;
  return dispatch_floating(params.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (params.inner >= 32) {
      reduce_by_thread<T><<<blocks_for(total, kThreads), kThreads, 0, stream>>>(params, total);
    } else {
      reduce_by_warp<T><<<blocks_for(total, kWarps), kThreads, 0, stream>>>(params, total);
    }
    return cudaGetLastError();
  });
}

int check_segments(const SegmentParams& params, std::int64_t* wrong, Stream stream) {
  const std::int64_t total = params.outer * (params.segments + (params.offsets ? 1 : 0));
  if (total == 0) return 0;
  note_wrong<<<blocks_for(total, kThreads), kThreads, 0, stream>>>(params, wrong);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
