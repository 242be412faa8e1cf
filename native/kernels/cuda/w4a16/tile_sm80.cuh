// Split-K, stage loads by cp.async and epilogue of the W4A16 GEMM on sm_80, tiles of TileM × 128.
//
// Where there are fewer tiles than SMs, up to 8 CTAs share a tile, each with a range of its k blocks. Partial sums are
// reduced through distributed shared memory of a cluster (sm_90 and newer), else through a workspace [split][m][n] by a
// second kernel (pad_and_reduce.cu), in a fixed order.
#pragma once

#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/w4a16/problem.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kTileN = 128;
constexpr int kAccStride = kTileN + 4;  // of accumulators in shared memory, in floats: no bank conflicts of rows 2t

constexpr int kWeightBytes = kTileN / 8 * 512;  // of a stage

static_assert(kWeightBytes == 2 * 16 * kThreads);

struct SplitK {
  int splits = 1;        // CTAs of a tile, neighbours in the grid
  int k_blocks = 1;      // of each of them
  bool cluster = false;  // they are a cluster

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) % splits; }
};

// A thread's cp.async loads of a stage: 16 bytes of every 16th row of x, of every 8th 8-column tile of weights, and
// scales, as `Format` has them. Addresses are computed once.
template <class Format>
class StageLoader {
 public:
  // x_to: the offset of the thread's first 16 bytes of x in a stage.
  __device__ __forceinline__ StageLoader(const typename Format::Gemm& p, int m0, int n0, std::uint32_t x_to)
      : x_step_(p.x_stride * 32), weight_step_(p.k * 32), x_to_(x_to), scales_(p, n0) {
    const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
    const int tile = thread / 32, lane = thread % 32;
    x_ = static_cast<const char*>(p.x) + (std::int64_t{m0 + row} * p.x_stride + chunk * 8) * 2;
    const std::int64_t rows = p.m - m0 - row;
    rows_ = rows < 1024 ? static_cast<int>(rows) : 1024;
    width_ = static_cast<int>(p.x_width) - chunk * 8;
    weight_ = static_cast<const char*>(p.weight) + (std::int64_t{n0 / 8 + tile} * p.k + lane * 4) * 4;
    tiles_ = static_cast<int>(p.n - n0) / 8 - tile;
    weight_width_ = static_cast<int>(p.k) - lane * 4;
  }

  // k block `k_block` to the stage at `to`; zeros out of bounds.
  template <int TileM, int XStep, int XBytes>
  __device__ __forceinline__ void load(std::uint32_t to, int k_block) const {
    const int thread = static_cast<int>(threadIdx.x), k0 = k_block * kW4A16BlockK;
    const int x_bytes = k0 < width_ ? 16 : 0;
    const char* x = x_ + std::int64_t{k0} * 2;
#pragma unroll
    for (int i = 0; i < TileM / 16; ++i, x += x_step_) {
      cp_async_16(to + x_to_ + i * XStep, x, i * 16 < rows_ ? x_bytes : 0);
    }
    const int weight_bytes = k0 < weight_width_ ? 16 : 0;
    const char* weight = weight_ + std::int64_t{k0} * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i, weight += weight_step_) {
      cp_async_16(to + XBytes + (thread + i * kThreads) * 16, weight, i * 8 < tiles_ ? weight_bytes : 0);
    }
    scales_.load(to + XBytes + kWeightBytes, k0);
  }

 private:
  const char *x_, *weight_;
  std::int64_t x_step_, weight_step_;  // bytes
  std::uint32_t x_to_;
  int rows_, width_, tiles_, weight_width_;
  typename Format::ScaleLoader scales_;
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

// Reduction over the splits, bias, and stores. sums: the CTA's [TileM][kAccStride] in shared memory. All threads call
// it.
template <class T, int TileM>
__device__ __forceinline__ void epilogue(const W4A16Gemm& p, const SplitK& split, const float* sums, int m0, int n0) {
  const std::int64_t rows_left = p.m - m0, columns_left = p.n - n0;
  const int pairs = (rows_left < TileM ? static_cast<int>(rows_left) : TileM) * (kTileN / 2);
  const auto thread = static_cast<int>(threadIdx.x);
  const auto place = [&](int i) { return sums + i / (kTileN / 2) * kAccStride + i % (kTileN / 2) * 2; };
  const auto inside = [&](int i) { return i % (kTileN / 2) * 2 < columns_left; };
#if __CUDA_ARCH__ >= 900
  if (split.cluster) {
    const int rank = split.rank();
    wait_for_cluster();
    for (int i = rank * kThreads + thread; i < pairs; i += kThreads * split.splits) {
      const float* const own = place(i);
      float2 sum{at_rank(own, 0), at_rank(own + 1, 0)};
      for (int r = 1; r < split.splits; ++r) sum.x += at_rank(own, r), sum.y += at_rank(own + 1, r);
      if (inside(i))
        store_pair<T>(p, std::int64_t{m0 + i / (kTileN / 2)}, std::int64_t{n0 + i % (kTileN / 2) * 2}, sum);
    }
    wait_for_cluster();  // until no other CTA reads this one's shared memory
    return;
  }
#endif
  for (int i = thread; i < pairs; i += kThreads) {
    if (!inside(i)) continue;
    const float2 sum = *reinterpret_cast<const float2*>(place(i));
    const std::int64_t row = m0 + i / (kTileN / 2), column = n0 + i % (kTileN / 2) * 2;
    if (split.splits == 1) {
      store_pair<T>(p, row, column, sum);
    } else {
      *reinterpret_cast<float2*>(p.workspace + (split.rank() * p.m + row) * p.n + column) = sum;
    }
  }
}

inline SplitK choose_split_k(const W4A16Gemm& p, int tile_m) {
  constexpr int kMaxSplits = 8, kMinKBlocks = 2;
  const std::int64_t tiles = (p.n + kTileN - 1) / kTileN * ((p.m + tile_m - 1) / tile_m);
  const auto k_blocks = static_cast<int>((p.k + kW4A16BlockK - 1) / kW4A16BlockK);
  SplitK split;
  // One wave: more CTAs would cost more reduction than they save. With TileM up to 32 an SM holds two CTAs.
  const int max_ctas = p.num_sms * (tile_m <= 32 ? 2 : 1);
  while (split.splits < kMaxSplits && tiles * split.splits * 2 <= max_ctas &&
         k_blocks >= split.splits * 2 * kMinKBlocks) {
    split.splits *= 2;
  }
  split.k_blocks = (k_blocks + split.splits - 1) / split.splits;
  split.cluster = split.splits > 1 && p.has_clusters;
  return split;
}

template <int TileM, class Gemm, class Kernel>
int launch_split_k(Kernel* kernel, const Gemm& p, int shared_bytes, Stream stream) {
  const SplitK split = choose_split_k(p, TileM);
  const std::int64_t tiles_n = (p.n + kTileN - 1) / kTileN, tiles_m = (p.m + TileM - 1) / TileM;
  if (tiles_m > 65535) return kNoKernel;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(tiles_n * split.splits), static_cast<unsigned>(tiles_m));
  how.threads = kThreads, how.shared_bytes = shared_bytes;
  how.cluster = split.cluster ? split.splits : 1;
  const int code = launch_kernel(kernel, how, stream, p, split);
  return code != 0 || split.splits == 1 || split.cluster ? code : w4a16_reduce_split_k(p, split.splits, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
