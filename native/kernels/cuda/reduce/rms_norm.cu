// RMSNorm: one pass over a row that stays in registers between the sum of squares and the result. A warp per row for
// rows of up to 2 KB, a CTA of 256 threads for longer ones.
//
//   x, out   [rows, width]   lane t of the row's threads has the 16-byte chunks t, t + threads, …; its first four stay
//                            in registers
//   reciprocal [rows]        warp shuffle, then shared memory across the CTA's warps
//
// Roofline: memory. x is read once and out written once while a row is at most 16 KB; the rest of a longer row is read
// again, from L2. The order of the additions depends on the width alone. Share of the roofline: not measured alone.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/rms_norm.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kKept = 4;

template <class T>
inline constexpr int kLanes = 16 / static_cast<int>(sizeof(T));

template <class T>
struct alignas(16) Chunk {
  T values[kLanes<T>];
};

template <class T>
__device__ __forceinline__ Chunk<T> load(const T* from, std::int64_t at, std::int64_t width, bool whole) {
  if (whole) return *reinterpret_cast<const Chunk<T>*>(from + at);
  Chunk<T> chunk;
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) chunk.values[j] = at + j < width ? from[at + j] : narrow<T>(0);
  return chunk;
}

template <class C>
__device__ __forceinline__ C sum_of_warp(C value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return 1.0 / sqrt(x); }

// whole: every chunk is aligned and within its row.
template <class T, class W, int kThreadsPerRow>
__global__ void __launch_bounds__(kThreads)
    normalise(const T* x, const W* weight, std::int64_t rows, std::int64_t width, Compute<T> eps, T* out,
              Compute<T>* reciprocal, bool whole) {
  using C = Compute<T>;
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const std::int64_t step = static_cast<std::int64_t>(kThreadsPerRow) * kLanes<T>;
  __shared__ C sums[kThreads / 32];
  for (std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRows; row0 < rows;
       row0 += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const std::int64_t row = row0 + static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const bool live = row < rows;  // the same for a whole warp
    const T* from = x + (live ? row : 0) * width;
    const std::int64_t limit = live ? width : 0;

    Chunk<T> kept[kKept];
    C sum = 0;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const std::int64_t at = thread * kLanes<T> + k * step;
      if (at >= limit) break;
      kept[k] = load(from, at, limit, whole);
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) sum += widen<T>(kept[k].values[j]) * widen<T>(kept[k].values[j]);
    }
    for (std::int64_t at = thread * kLanes<T> + kKept * step; at < limit; at += step) {
      const Chunk<T> chunk = load(from, at, limit, whole);
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) sum += widen<T>(chunk.values[j]) * widen<T>(chunk.values[j]);
    }
    sum = sum_of_warp(sum);
    if constexpr (kThreadsPerRow > 32) {
      if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
      __syncthreads();
      sum = 0;
#pragma unroll
      for (int w = 0; w < kThreads / 32; ++w) sum += sums[w];
      __syncthreads();  // the next row writes them
    }
    const C scale = reciprocal_root(sum / static_cast<C>(width) + eps);
    if (live && thread == 0) reciprocal[row] = scale;

    T* to = out + (live ? row : 0) * width;
    const auto finish = [&](const Chunk<T>& chunk, std::int64_t at) {
      Chunk<T> result;
#pragma unroll
      for (int j = 0; j < kLanes<T>; ++j) {
        const C w = weight == nullptr || at + j >= limit ? C(1) : static_cast<C>(widen<W>(weight[at + j]));
        result.values[j] = narrow<T>(widen<T>(chunk.values[j]) * scale * w);
      }
      if (whole) {
        *reinterpret_cast<Chunk<T>*>(to + at) = result;
      } else {
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) {
          if (at + j < limit) to[at + j] = result.values[j];
        }
      }
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const std::int64_t at = thread * kLanes<T> + k * step;
      if (at >= limit) break;
      finish(kept[k], at);
    }
    for (std::int64_t at = thread * kLanes<T> + kKept * step; at < limit; at += step) {
      finish(load(from, at, limit, whole), at);
    }
  }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

template <class T, class W>
int launch(const RmsNorm& p, Stream stream) {
  using C = Compute<T>;
  const bool whole = p.width % kLanes<T> == 0 && aligned(p.x) && aligned(p.out);
  const auto run = [&](auto kernel, int rows_per_cta) {
    kernel<<<blocks_for(p.rows, rows_per_cta), kThreads, 0, stream>>>(
        static_cast<const T*>(p.x), static_cast<const W*>(p.weight), p.rows, p.width, static_cast<C>(p.eps),
        static_cast<T*>(p.out), static_cast<C*>(p.reciprocal), whole);
    return static_cast<int>(cudaGetLastError());
  };
  if (p.width <= 32 * kLanes<T> * kKept) return run(normalise<T, W, 32>, kThreads / 32);
  return run(normalise<T, W, kThreads>, 1);
}

}  // namespace

int rms_norm(const RmsNorm& p, Stream stream) {
  if (p.rows == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if (p.weight == nullptr || p.weight_dtype == p.dtype) return launch<T, T>(p, stream);
    if constexpr (is_half_type<T>) {
      if (p.weight_dtype == DType::kFloat32) return launch<T, float>(p, stream);
    }
    return kNoKernel;
  });
}

}  // namespace untorch::kernels::cuda
