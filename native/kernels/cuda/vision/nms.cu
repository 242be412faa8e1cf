// Non-maximum suppression: a bitmask in tiles of 64 × 64 boxes, then an in-order reduction in one CTA.
//
//   mask[i][t]  bit b: box i (in the order of scores) suppresses box 64 t + b; only tiles t ≥ i / 64 are written
//   CTA (t, r)  64 threads: box 64 r + thread against the 64 boxes of tile t, which lie in shared memory
//   reduction   tile by tile: one thread walks the tile's 64 diagonal words, then all threads OR the rows of the boxes
//               that stay into the words to the right of it, kept in shared memory
//
// Roofline: n² / 2 intersections of about 20 operations, n² / 16 bytes of mask written; the reduction reads them in one
// SM and bounds large n (about 100 GB/s). Its share has not been measured.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/detection.h"

namespace untorch::kernels::cuda {
namespace {

using Word = unsigned long long;
constexpr int kTile = 64, kThreads = 512;

template <class T>
__device__ __forceinline__ T larger(T a, T b) {
  if constexpr (std::is_same_v<T, __half>)
    return __hgt(a, b) ? a : b;
  else
    return a > b ? a : b;
}
template <class T>
__device__ __forceinline__ T smaller(T a, T b) {
  if constexpr (std::is_same_v<T, __half>)
    return __hlt(a, b) ? a : b;
  else
    return a < b ? a : b;
}
template <class T>
__device__ __forceinline__ T minus(T a, T b) {
  if constexpr (std::is_same_v<T, __half>)
    return __hsub(a, b);
  else
    return a - b;
}

// Differences in the boxes' dtype, areas in the accumulator's, as torchvision computes them: on the threshold the last
// bit decides.
template <class T>
__device__ __forceinline__ bool suppresses(const T* a, const T* b, float threshold) {
  using C = Compute<T>;
  const T zero = narrow<T>(C(0));
  const T width = larger(minus(smaller(a[2], b[2]), larger(a[0], b[0])), zero),
          height = larger(minus(smaller(a[3], b[3]), larger(a[1], b[1])), zero);
  const C common = widen(width) * widen(height);
  const C first = (widen(a[2]) - widen(a[0])) * widen(minus(a[3], a[1])),
          second = (widen(b[2]) - widen(b[0])) * widen(minus(b[3], b[1]));
  return common / (first + second - common) > threshold;
}

template <class T>
__global__ void __launch_bounds__(kTile) make_mask(const T* __restrict__ boxes, const std::int64_t* __restrict__ order,
                                                   int n, int words, float threshold, Word* __restrict__ mask) {
  const int tile = static_cast<int>(blockIdx.x), rows = static_cast<int>(blockIdx.y);
  if (tile < rows) return;
  __shared__ T others[kTile * 4];
  const int thread = static_cast<int>(threadIdx.x), first = tile * kTile, count = n - first < kTile ? n - first : kTile;
  if (thread < count) {
    const T* const from = boxes + order[first + thread] * 4;
#pragma unroll
    for (int d = 0; d < 4; ++d) others[thread * 4 + d] = from[d];
  }
  __syncthreads();
  const int mine = rows * kTile + thread;
  if (mine >= n) return;
  T box[4];
#pragma unroll
  for (int d = 0; d < 4; ++d) box[d] = boxes[order[mine] * 4 + d];
  Word bits = 0;
  for (int b = tile == rows ? thread + 1 : 0; b < count; ++b) {
    if (suppresses(box, others + b * 4, threshold)) bits |= Word{1} << b;
  }
  mask[static_cast<std::int64_t>(mine) * words + tile] = bits;
}

__global__ void __launch_bounds__(kThreads)
    reduce_mask(const Word* __restrict__ mask, const std::int64_t* __restrict__ order, int n, int words,
                std::int64_t* __restrict__ kept) {
  extern __shared__ Word removed[];
  __shared__ Word diagonal[kTile], staying;
  const int thread = static_cast<int>(threadIdx.x);
  for (int w = thread; w < words; w += kThreads) removed[w] = 0;
  std::int64_t total = 0;
  for (int tile = 0; tile < words; ++tile) {
    const int first = tile * kTile, count = n - first < kTile ? n - first : kTile;
    if (thread < count) diagonal[thread] = mask[static_cast<std::int64_t>(first + thread) * words + tile];
    __syncthreads();  // removed[tile] is final as well
    if (thread == 0) {
      Word gone = removed[tile], stay = 0;
      for (int b = 0; b < count; ++b) {
        if ((gone >> b & 1) != 0) continue;
        stay |= Word{1} << b;
        gone |= diagonal[b];
      }
      staying = stay;
    }
    __syncthreads();
    const Word stay = staying;
    if (thread < count && (stay >> thread & 1) != 0) {
      kept[total + __popcll(stay & ((Word{1} << thread) - 1))] = order[first + thread];
    }
    total += __popcll(stay);
    for (int w = tile + 1 + thread; w < words; w += kThreads) {
      Word gone = removed[w];
      for (Word rest = stay; rest != 0; rest &= rest - 1) {
        gone |= mask[static_cast<std::int64_t>(first + __ffsll(static_cast<long long>(rest)) - 1) * words + w];
      }
      removed[w] = gone;
    }
  }
  if (thread == 0) kept[n] = total;
}

}  // namespace

std::size_t nms_scratch(std::int64_t n) {
  return static_cast<std::size_t>(n) * static_cast<std::size_t>((n + kTile - 1) / kTile) * sizeof(Word);
}

int nms(const Nms& p, void* scratch, std::int64_t* kept, Stream stream) {
  if (p.n == 0 || p.n > kNmsMax) return kNoKernel;
  const int n = static_cast<int>(p.n), words = (n + kTile - 1) / kTile;
  auto* const mask = static_cast<Word*>(scratch);
  const auto launch = [&](auto type) {
    using T = typename decltype(type)::type;
    const dim3 grid(static_cast<unsigned>(words), static_cast<unsigned>(words));
    make_mask<T><<<grid, kTile, 0, stream>>>(static_cast<const T*>(p.boxes), p.order, n, words,
                                             static_cast<float>(p.threshold), mask);
    return static_cast<int>(cudaGetLastError());
  };
  const int code = p.dtype == DType::kFloat16   ? launch(Type<__half>{})
                   : p.dtype == DType::kFloat32 ? launch(Type<float>{})
                   : p.dtype == DType::kFloat64 ? launch(Type<double>{})
                                                : kNoKernel;
  if (code != 0) return code;
  reduce_mask<<<1, kThreads, static_cast<unsigned>(words) * sizeof(Word), stream>>>(mask, p.order, n, words, kept);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
