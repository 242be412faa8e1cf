// Segmented reduction of sorted entries: what meets in one place is combined by one thread in the order of the source,
// so that the result has the same bits every time, for every dtype, without atomics.
//
//   sorted keys  [ 3 3 3 | 7 | 9 9 ... ]   a thread for each (entry, slice element); the first of a segment walks it,
//   ids          [ 0 4 5 | 1 | 2 3 ... ]   four loads in flight, the others leave at once
//
// Roofline: keys and ids (12 bytes) once for each slice element of an entry, from L1 within a slice; every source
// element once, every element of out that is met read and written once. Many values in few places with slices of a few
// elements are bound by the latency of the walk, not by memory.
#include <limits>

#include "kernels/cuda/common/complex.cuh"
#include "kernels/cuda/common/divide.cuh"
#include "kernels/scatter.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__device__ __forceinline__ bool is_nan(T value) {
  if constexpr (std::is_floating_point_v<T>)
    return value != value;
  else
    return false;
}

template <class C>
__device__ __forceinline__ C start_of(ReduceOp op) {
  if constexpr (is_complex_type<C>) {
    return C{};
  } else {
    using Limits = std::numeric_limits<C>;
    constexpr C kLow = Limits::has_infinity ? static_cast<C>(-Limits::infinity()) : Limits::lowest();
    constexpr C kHigh = Limits::has_infinity ? Limits::infinity() : Limits::max();
    switch (op) {
      case ReduceOp::kProd:
        return static_cast<C>(1);
      case ReduceOp::kMax:
        return kLow;
      case ReduceOp::kMin:
        return kHigh;
      default:
        return static_cast<C>(0);
    }
  }
}

// NaN wins over everything in the extrema.
template <class C>
__device__ __forceinline__ C combine(ReduceOp op, C a, C b) {
  if constexpr (is_complex_type<C>) {
    return a + b;
  } else if constexpr (std::is_same_v<C, bool>) {
    return op == ReduceOp::kProd || op == ReduceOp::kMin ? a && b : a || b;
  } else {
    switch (op) {
      case ReduceOp::kProd:
        return static_cast<C>(a * b);
      case ReduceOp::kMax:
        return is_nan(b) || a < b ? b : a;
      case ReduceOp::kMin:
        return is_nan(b) || b < a ? b : a;
      default:
        return static_cast<C>(a + b);
    }
  }
}

template <class C>
__device__ __forceinline__ C divide(C sum, std::int64_t count) {
  if constexpr (is_complex_type<C> || std::is_same_v<C, bool>) {
    return sum;
  } else if constexpr (std::is_floating_point_v<C>) {
    return sum / static_cast<C>(count);
  } else if constexpr (std::is_same_v<C, std::uint64_t>) {
    return sum / static_cast<std::uint64_t>(count);
  } else {
    // The count may not fit C (int8 with 200 values), and a negative sum rounds down.
    const auto wide = static_cast<std::int64_t>(sum);
    const std::int64_t quotient = wide / count;
    return static_cast<C>(quotient - (wide % count < 0 ? 1 : 0));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) reduce(Segments segments, Strided<3> slice, Strided<2> positions, T* out,
                                                   const T* source, ReduceOp op, bool include_self) {
  using C = decltype(load_wide(source));
  constexpr std::uint64_t kSkipped = ~std::uint64_t{0};
  const std::int64_t total = segments.count * slice.numel, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    const std::int64_t entry = divided(i, slice.numel, total);
    const std::uint64_t key = segments.keys[entry];
    if (key == kSkipped || (entry > 0 && segments.keys[entry - 1] == key)) continue;
    std::int64_t at[3];
    offsets(slice, i - entry * slice.numel, at);
    T* const to = out + static_cast<std::int64_t>(key) + at[1];
    const T* const from = source + at[2];
    const auto value_of = [&](std::int64_t e) {
      std::int64_t where[2];
      offsets(positions, static_cast<std::int64_t>(segments.ids[e]), where);
      return load_wide(from + where[1]);
    };
    C sum = include_self ? load_wide(to) : start_of<C>(op);
    std::int64_t next = entry;
    for (; next + 4 <= segments.count && segments.keys[next + 3] == key; next += 4) {
      C values[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) values[k] = value_of(next + k);
#pragma unroll
      for (int k = 0; k < 4; ++k) sum = combine(op, sum, values[k]);
    }
    for (; next < segments.count && segments.keys[next] == key; ++next) sum = combine(op, sum, value_of(next));
    if (op == ReduceOp::kMean) sum = divide(sum, next - entry + (include_self ? 1 : 0));
    store_narrow(to, sum);
  }
}

}  // namespace

int reduce_segments(const Segments& segments, const Strided<3>& slice, const Strided<2>& positions, void* out,
                    const void* source, DType dtype, ReduceOp op, bool include_self, Stream stream) {
  if (segments.count == 0 || slice.numel == 0) return 0;
  const auto body = [&](auto type) -> int {
    using T = typename decltype(type)::type;
    reduce<T><<<blocks_for(segments.count * slice.numel, kThreads), kThreads, 0, stream>>>(
        segments, slice, positions, static_cast<T*>(out), static_cast<const T*>(source), op, include_self);
    return cudaGetLastError();
  };
  if (dtype == DType::kComplex64 && op == ReduceOp::kSum) return body(Type<Complex<float>>{});
  if (dtype == DType::kComplex128 && op == ReduceOp::kSum) return body(Type<Complex<double>>{});
  return dispatch_real(dtype, body);
}

}  // namespace untorch::kernels::cuda
