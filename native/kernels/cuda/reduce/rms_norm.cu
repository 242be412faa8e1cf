// RMSNorm, of x or of a residual sum x + added: one pass over a row that stays in registers between the sum of squares
// and the result. A warp per row for rows of up to 2 KB, a CTA of 256 threads for longer ones.
//
//   x, added, sum, out   lane t of the row's threads has the 16-byte chunks t, t + threads, …; its first four stay in
//     [rows, width]      registers
//   reciprocal [rows]    warp shuffle, then shared memory across the CTA's warps
//
// Roofline: memory. x is read once and out written once while a row is at most 16 KB; the rest of a longer row is read
// again, from L2. The order of the additions depends on the width alone. Share of the roofline: not measured alone.
#include <type_traits>

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
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

template <class T>
__device__ __forceinline__ void store(T* to, std::int64_t at, std::int64_t width, bool whole, const Chunk<T>& chunk) {
  if (whole) {
    *reinterpret_cast<Chunk<T>*>(to + at) = chunk;
    return;
  }
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) {
    if (at + j < width) to[at + j] = chunk.values[j];
  }
}

template <class T>
__device__ __forceinline__ Chunk<T> operator+(const Chunk<T>& a, const Chunk<T>& b) {
  Chunk<T> out;
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) out.values[j] = narrow<T>(widen<T>(a.values[j]) + widen<T>(b.values[j]));
  return out;
}

template <class T>
__device__ __forceinline__ void add_squares(Compute<T>& sum, const Chunk<T>& chunk) {
#pragma unroll
  for (int j = 0; j < kLanes<T>; ++j) sum += widen<T>(chunk.values[j]) * widen<T>(chunk.values[j]);
}

template <class C>
__device__ __forceinline__ C sum_of_warp(C value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ float reciprocal_root(float x) { return 1.0f / sqrtf(x); }
__device__ __forceinline__ double reciprocal_root(double x) { return 1.0 / sqrt(x); }

template <class T, class W>
struct Rows {
  const T* x;
  const T* added;  // and `sum`: where kAdds is set
  T* sum;
  const W* weight;
  std::int64_t rows, width;
  Compute<T> eps;
  T* out;
  Compute<T>* reciprocal;
  bool whole;         // every chunk is aligned and within its row
  bool whole_weight;  // as is every chunk of a weight of T
};

template <class T, class W, int kThreadsPerRow, bool kAdds>
__global__ void __launch_bounds__(kThreads) normalise(Rows<T, W> p) {
  using C = Compute<T>;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  constexpr int kRows = kThreads / kThreadsPerRow;
  const int thread = static_cast<int>(threadIdx.x) % kThreadsPerRow;
  const std::int64_t step = static_cast<std::int64_t>(kThreadsPerRow) * kLanes<T>;
  __shared__ C sums[kThreads / 32];
  for (std::int64_t row0 = static_cast<std::int64_t>(blockIdx.x) * kRows; row0 < p.rows;
       row0 += static_cast<std::int64_t>(gridDim.x) * kRows) {
    const std::int64_t row = row0 + static_cast<int>(threadIdx.x) / kThreadsPerRow;
    const bool live = row < p.rows;  // the same for a whole warp
    const std::int64_t limit = live ? p.width : 0, start = live ? row * p.width : 0;
    // The value that is normalised: loaded for the first time, then as it was written.
    const auto first_load = [&](std::int64_t at) {
      if constexpr (kAdds) {
        const Chunk<T> chunk = load(p.x + start, at, limit, p.whole) + load(p.added + start, at, limit, p.whole);
        store(p.sum + start, at, limit, p.whole, chunk);
        return chunk;
      } else {
        return load(p.x + start, at, limit, p.whole);
      }
    };

    Chunk<T> kept[kKept];
    if constexpr (kAdds) {
      // All loads before the first store, which may be to the same memory.
      Chunk<T> added[kKept];
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const std::int64_t at = thread * kLanes<T> + k * step;
        if (at >= limit) break;
        kept[k] = load(p.x + start, at, limit, p.whole);
        added[k] = load(p.added + start, at, limit, p.whole);
      }
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const std::int64_t at = thread * kLanes<T> + k * step;
        if (at >= limit) break;
        kept[k] = kept[k] + added[k];
        store(p.sum + start, at, limit, p.whole, kept[k]);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const std::int64_t at = thread * kLanes<T> + k * step;
        if (at >= limit) break;
        kept[k] = load(p.x + start, at, limit, p.whole);
      }
    }
    C sum = 0;
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      if (thread * kLanes<T> + k * step >= limit) break;
      add_squares(sum, kept[k]);
    }
    for (std::int64_t at = thread * kLanes<T> + kKept * step; at < limit; at += step) {
      add_squares(sum, first_load(at));
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
    const C scale = reciprocal_root(sum / static_cast<C>(p.width) + p.eps);
    if (live && thread == 0 && p.reciprocal != nullptr) p.reciprocal[row] = scale;

    const auto finish = [&](const Chunk<T>& chunk, std::int64_t at) {
      Chunk<T> result;
      if (std::is_same_v<T, W> && p.whole_weight) {
        const Chunk<T> weight = load(reinterpret_cast<const T*>(p.weight), at, limit, true);
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) {
          result.values[j] = narrow<T>(widen<T>(chunk.values[j]) * scale * widen<T>(weight.values[j]));
        }
      } else {
#pragma unroll
        for (int j = 0; j < kLanes<T>; ++j) {
          const C w = p.weight == nullptr || at + j >= limit ? C(1) : static_cast<C>(widen<W>(p.weight[at + j]));
          result.values[j] = narrow<T>(widen<T>(chunk.values[j]) * scale * w);
        }
      }
      store(p.out + start, at, limit, p.whole, result);
    };
#pragma unroll
    for (int k = 0; k < kKept; ++k) {
      const std::int64_t at = thread * kLanes<T> + k * step;
      if (at >= limit) break;
      finish(kept[k], at);
    }
    for (std::int64_t at = thread * kLanes<T> + kKept * step; at < limit; at += step) {
      finish(load((kAdds ? p.sum : p.x) + start, at, limit, p.whole), at);
    }
  }
}

bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }

template <class T, class W, bool kAdds>
int launch(const RmsNorm& p, Stream stream) {
  using C = Compute<T>;
  Rows<T, W> rows{};
  rows.x = static_cast<const T*>(p.x), rows.added = static_cast<const T*>(p.added), rows.sum = static_cast<T*>(p.sum);
  rows.weight = static_cast<const W*>(p.weight);
  rows.rows = p.rows, rows.width = p.width, rows.eps = static_cast<C>(p.eps);
  rows.out = static_cast<T*>(p.out), rows.reciprocal = static_cast<C*>(p.reciprocal);
  rows.whole = p.width % kLanes<T> == 0 && aligned(p.x) && aligned(p.out) && aligned(p.added) && aligned(p.sum);
  rows.whole_weight = p.width % kLanes<T> == 0 && p.weight != nullptr && aligned(p.weight);
  const auto run = [&](auto kernel, int rows_per_cta) {
    Launch how{};
    how.blocks = dim3(blocks_for(p.rows, rows_per_cta));
    how.threads = kThreads;
    how.pdl = p.pdl;
    return launch_kernel(kernel, how, stream, rows);
  };
  if (p.width <= 32 * kLanes<T> * kKept) return run(normalise<T, W, 32, kAdds>, kThreads / 32);
  return run(normalise<T, W, kThreads, kAdds>, 1);
}

}  // namespace

int rms_norm(const RmsNorm& p, Stream stream) {
  if (p.rows == 0) return 0;
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    const bool same = p.weight == nullptr || p.weight_dtype == p.dtype;
    if (p.added != nullptr) {
      if constexpr (!std::is_same_v<T, double>) return same ? launch<T, T, true>(p, stream) : kNoKernel;
      return kNoKernel;
    }
    if (same) return launch<T, T, false>(p, stream);
    if constexpr (is_half_type<T>) {
      if (p.weight_dtype == DType::kFloat32) return launch<T, float, false>(p, stream);
    }
    return kNoKernel;
  });
}

}  // namespace untorch::kernels::cuda
