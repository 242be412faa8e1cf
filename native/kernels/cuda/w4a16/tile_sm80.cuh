// What kernels with packed weights that make tiles of 128 columns share: how k is shared between blocks, what a stage
// has, and the end of a tile.
//
// Where the tiles are fewer than the num_sms, up to 8 blocks share one and take ranges of k: sums meet in
// shared memory over a cluster (sm_90 and newer), else in a workspace that a second kernel adds up, in a fixed order.
#pragma once

#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/w4a16/problem.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kCols = 128;
constexpr int kPitch = kCols + 4;  // of the sums in shared memory, in floats: rows 2 t fall into different banks

constexpr int kWeightBytes = kCols / 8 * 512;  // of a tile's block of 128 k's

static_assert(kWeightBytes == 2 * 16 * kThreads);

// How a tile's k is shared between blocks, in blocks of 128.
struct Split {
  int parts = 1;         // blocks of a tile, neighbours in the grid
  int depth = 1;         // blocks of 128 k's for each of them
  bool cluster = false;  // they are one

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) % parts; }
};

// What a thread copies of every stage: a chunk of every 16th row of x, of every 8th tile of weights, and of the scales,
// as `Format` has them. Worked out once, so that a stage costs little beside the copies themselves.
template <class Format>
class StageCopies {
 public:
  // x_to: where the thread's first chunk of x goes in a stage.
  __device__ __forceinline__ StageCopies(const typename Format::Gemm& p, int top, int first, std::uint32_t x_to)
      : x_step_(p.x_row * 32), weight_step_(p.k * 32), x_to_(x_to), scales_(p, first) {
    const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
    const int tile = thread / 32, lane = thread % 32;
    x_ = static_cast<const char*>(p.x) + (std::int64_t{top + row} * p.x_row + chunk * 8) * 2;
    const std::int64_t rows = p.m - top - row;
    rows_ = rows < 1024 ? static_cast<int>(rows) : 1024;
    width_ = static_cast<int>(p.x_width) - chunk * 8;
    weight_ = static_cast<const char*>(p.weight) + (std::int64_t{first / 8 + tile} * p.k + lane * 4) * 4;
    tiles_ = static_cast<int>(p.n - first) / 8 - tile;
    weight_width_ = static_cast<int>(p.k) - lane * 4;
  }

  // Block `block` of k into the stage at `to`; zeros where there is nothing.
  template <int Rows, int XStep, int XBytes>
  __device__ __forceinline__ void load(std::uint32_t to, int block) const {
    const int thread = static_cast<int>(threadIdx.x), k0 = block * kW4A16BlockK;
    const int x_bytes = k0 < width_ ? 16 : 0;
    const char* x = x_ + std::int64_t{k0} * 2;
#pragma unroll
    for (int i = 0; i < Rows / 16; ++i, x += x_step_) {
      copy_chunk(to + x_to_ + i * XStep, x, i * 16 < rows_ ? x_bytes : 0);
    }
    const int weight_bytes = k0 < weight_width_ ? 16 : 0;
    const char* weight = weight_ + std::int64_t{k0} * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i, weight += weight_step_) {
      copy_chunk(to + XBytes + (thread + i * kThreads) * 16, weight, i * 8 < tiles_ ? weight_bytes : 0);
    }
    scales_.load(to + XBytes + kWeightBytes, k0);
  }

 private:
  const char *x_, *weight_;
  std::int64_t x_step_, weight_step_;  // bytes
  std::uint32_t x_to_;
  int rows_, width_, tiles_, weight_width_;
  typename Format::Copies scales_;
};

template <class T>
__device__ __forceinline__ void store_pair(const W4A16Gemm& p, std::int64_t row, std::int64_t column, float2 sum) {
  if (p.bias != nullptr) {
    const T* const bias = static_cast<const T*>(p.bias) + column;
    sum.x += widen(bias[0]), sum.y += widen(bias[1]);
  }
  struct alignas(4) Two {
    T x, y;
  };
  *reinterpret_cast<Two*>(static_cast<T*>(p.out) + row * p.n + column) = Two{narrow<T>(sum.x), narrow<T>(sum.y)};
}

// sums: [Rows][kPitch] in shared memory, complete for the whole block. Every thread of the block calls it.
template <class T, int Rows>
__device__ __forceinline__ void finish_tile(const W4A16Gemm& p, const Split& split, const float* sums, int top,
                                            int first) {
  const std::int64_t rows_left = p.m - top, columns_left = p.n - first;
  const int pairs = (rows_left < Rows ? static_cast<int>(rows_left) : Rows) * (kCols / 2);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto place = [&](int i) { return sums + i / (kCols / 2) * kPitch + i % (kCols / 2) * 2; };
  const auto inside = [&](int i) { return i % (kCols / 2) * 2 < columns_left; };
#if __CUDA_ARCH__ >= 900
  if (split.cluster) {
    const int rank = split.rank();
    wait_for_cluster();
    for (int i = rank * kThreads + thread; i < pairs; i += kThreads * split.parts) {
      const float* const own = place(i);
      float2 sum{at_rank(own, 0), at_rank(own + 1, 0)};
      for (int r = 1; r < split.parts; ++r) sum.x += at_rank(own, r), sum.y += at_rank(own + 1, r);
      if (inside(i))
        store_pair<T>(p, std::int64_t{top + i / (kCols / 2)}, std::int64_t{first + i % (kCols / 2) * 2}, sum);
    }
    wait_for_cluster();  // what others still read must not go away
    return;
  }
#endif
  for (int i = thread; i < pairs; i += kThreads) {
    if (!inside(i)) continue;
    const float2 sum = *reinterpret_cast<const float2*>(place(i));
    const std::int64_t row = top + i / (kCols / 2), column = first + i % (kCols / 2) * 2;
    if (split.parts == 1) {
      store_pair<T>(p, row, column, sum);
    } else {
      *reinterpret_cast<float2*>(p.workspace + (split.rank() * p.m + row) * p.n + column) = sum;
    }
  }
}

inline Split split_of(const W4A16Gemm& p, int rows) {
  constexpr int kMostParts = 8, kLeastDepth = 2;
  const std::int64_t tiles = (p.n + kCols - 1) / kCols * ((p.m + rows - 1) / rows);
  const auto blocks = static_cast<int>((p.k + kW4A16BlockK - 1) / kW4A16BlockK);
  Split split;
  // One wave: more would move more sums than they save. Blocks of up to 32 rows have room for another one beside them.
  const int most = p.num_sms * (rows <= 32 ? 2 : 1);
  while (split.parts < kMostParts && tiles * split.parts * 2 <= most && blocks >= split.parts * 2 * kLeastDepth) {
    split.parts *= 2;
  }
  split.depth = (blocks + split.parts - 1) / split.parts;
  split.cluster = split.parts > 1 && p.has_clusters;
  return split;
}

template <int Rows, class Gemm, class Kernel>
int launch_tiles(Kernel* kernel, const Gemm& p, int shared_bytes, Stream stream) {
  const Split split = split_of(p, Rows);
  const std::int64_t tiles = (p.n + kCols - 1) / kCols, row_tiles = (p.m + Rows - 1) / Rows;
  if (row_tiles > 65535) return kNoKernel;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(tiles * split.parts), static_cast<unsigned>(row_tiles));
  how.threads = kThreads, how.shared_bytes = shared_bytes;
  how.cluster = split.cluster ? split.parts : 1;
  const int code = launch_kernel(kernel, how, stream, p, split);
  return code != 0 || split.parts == 1 || split.cluster ? code : w4a16_reduce_split_k(p, split.parts, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
