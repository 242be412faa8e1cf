// What int4 kernels that make tiles of 128 columns share: how k is shared between blocks, and the end of a tile.
//
// Where the tiles are fewer than the multiprocessors, up to 8 blocks share one and take ranges of k: sums meet in
// shared memory over a cluster (sm_90 and newer), else in a workspace that a second kernel adds up, in a fixed order.
#pragma once

#include "kernels/cuda/gemm_small.cuh"
#include "kernels/cuda/int4.h"
#include "kernels/cuda/int4_weights.cuh"
#include "kernels/cuda/tile_memory.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kCols = 128;
constexpr int kPitch = kCols + 4;  // of the sums in shared memory, in floats: rows 2 t fall into different banks

constexpr int kWeightBytes = kCols / 8 * 512, kScaleBytes = 4 * kCols * 4;  // of a tile's block of 128 k's

// How a tile's k is shared between blocks, in blocks of 128.
struct Split {
  int parts = 1;         // blocks of a tile, neighbours in the grid
  int depth = 1;         // blocks of 128 k's for each of them
  bool cluster = false;  // they are one

  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) % parts; }
};

// The weights and scales of block `block` of k, [tile of 8 columns][512 bytes] and [group][column]; zeros where there
// is nothing.
__device__ __forceinline__ void load_weights(const Int4Gemm& p, std::uint32_t to, int first, int block,
                                             int group_bits) {
  const int thread = static_cast<int>(threadIdx.x), k0 = block * kInt4BlockK;
  const char* const weight = static_cast<const char*>(p.weight);
#pragma unroll
  for (int i = 0; i < kWeightBytes / 16 / kThreads; ++i) {
    const int at = thread + i * kThreads, tile = at / 32, chunk = at % 32;
    // A chunk is 4 words, 32 weights; of 128 of them a lane's word j is for one k.
    const bool inside = first + tile * 8 < p.n && k0 + chunk * 4 < p.k;
    const std::int64_t from = inside ? (std::int64_t{first / 8 + tile} * p.k + k0) * 4 + chunk * 16 : 0;
    copy_chunk(to + at * 16, weight + from, inside ? 16 : 0);
  }
  if (thread < 128) {
    const int line = thread / 32, chunk = thread % 32, k = k0 + (line << group_bits);
    const bool inside = (line << group_bits) < kInt4BlockK && k < p.k && first + chunk * 4 < p.n;
    const std::int64_t from = inside ? std::int64_t{k >> group_bits} * p.n + first + chunk * 4 : 0;
    copy_chunk(to + kWeightBytes + thread * 16, static_cast<const char*>(p.scales) + from * 4, inside ? 16 : 0);
  }
}

template <class T>
__device__ __forceinline__ void store_pair(const Int4Gemm& p, std::int64_t row, std::int64_t column, float2 sum) {
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
__device__ __forceinline__ void finish_tile(const Int4Gemm& p, const Split& split, const float* sums, int top,
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

inline Split split_of(const Int4Gemm& p, int rows) {
  constexpr int kMostParts = 8, kLeastDepth = 2;
  const std::int64_t tiles = (p.n + kCols - 1) / kCols * ((p.m + rows - 1) / rows);
  const auto blocks = static_cast<int>((p.k + kInt4BlockK - 1) / kInt4BlockK);
  Split split;
  // As many as there are multiprocessors: more would move more sums than they save.
  while (split.parts < kMostParts && tiles * split.parts * 2 <= p.multiprocessors + p.multiprocessors / 8 &&
         blocks >= split.parts * 2 * kLeastDepth) {
    split.parts *= 2;
  }
  split.depth = (blocks + split.parts - 1) / split.parts;
  split.cluster = split.parts > 1 && p.has_clusters;
  return split;
}

template <int Rows, class Kernel>
int launch_tiles(Kernel* kernel, const Int4Gemm& p, int shared_bytes, Stream stream) {
  const Split split = split_of(p, Rows);
  const std::int64_t tiles = (p.n + kCols - 1) / kCols, row_tiles = (p.m + Rows - 1) / Rows;
  if (row_tiles > 65535) return kNoKernel;
  if (shared_bytes > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (code != cudaSuccess) return code;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(tiles * split.parts), static_cast<unsigned>(row_tiles));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(split.parts);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  config.attrs = &attribute;
  config.numAttrs = split.cluster ? 1 : 0;
  const int code = cudaLaunchKernelEx(&config, kernel, p, split);
  return code != 0 || split.parts == 1 || split.cluster ? code : int4_add_parts(p, split.parts, stream);
}

}  // namespace
}  // namespace untorch::kernels::cuda
