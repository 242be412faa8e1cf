// Small-M GEMM: the split-K schedule over warps and over the CTAs of a cluster, the reduction and the epilogue.
//
// A CTA has 8 warps. A tile of the result (up to 16 rows, `Cols` columns) belongs to `split` of them, which take turns
// along k; so a CTA has 8 / split tiles. Where that leaves SMs idle, the CTAs of a cluster (sm_90 and newer) share the
// same tiles and take turns along k as well. Partial sums meet in shared memory, within a CTA and then through
// distributed shared memory across the cluster, and are added in a fixed order: no fix-up pass, no atomics.
#pragma once

#include <algorithm>

#include "kernels/cuda/common/cluster.cuh"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/common/load_once.cuh"
#include "kernels/cuda/gemm/small_m.h"

namespace untorch::kernels::cuda {

inline constexpr int kGemmWarps = 8;
inline constexpr int kGemmThreads = kGemmWarps * 32;
inline constexpr int kGemmRows = 16;   // of the result, per CTA
inline constexpr int kMaxCluster = 8;  // what every GPU with clusters takes

__device__ __forceinline__ float activated(float x, Activation activation) {
  if (activation == Activation::kRelu) return x < 0.0f ? 0.0f : x;  // keeps a NaN
  if (activation == Activation::kGeluTanh) {
    return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
  }
  return x;
}
__device__ __forceinline__ double activated(double x, Activation activation) {
  if (activation == Activation::kRelu) return x < 0.0 ? 0.0 : x;
  if (activation == Activation::kGeluTanh) {
    return 0.5 * x * (1.0 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
  }
  return x;
}

// Split-K: over the warps of a CTA, then over the CTAs of a cluster. Powers of two, kept as exponents.
struct Shares {
  int split_bits = 0, cluster_bits = 0;

  __host__ __device__ int split() const { return 1 << split_bits; }
  __host__ __device__ int cluster() const { return 1 << cluster_bits; }
  __host__ __device__ int tiles() const { return kGemmWarps >> split_bits; }  // of a CTA
  __device__ __forceinline__ int group() const { return static_cast<int>(blockIdx.x) >> cluster_bits; }
  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (cluster() - 1); }
};

// Where a warp stands: its first column, and its turn among those that share the tile.
struct Place {
  std::int64_t first, top;
  int turn, turns;
};
template <int Cols>
__device__ __forceinline__ Place place_of(Shares shares) {
  const int warp = static_cast<int>(threadIdx.x) / 32,
            tile = shares.group() * shares.tiles() + (warp >> shares.split_bits);
  const int turn = (shares.rank() << shares.split_bits) + (warp & (shares.split() - 1));
  return {std::int64_t{tile} * Cols, std::int64_t{blockIdx.y} * kGemmRows, turn, shares.split() << shares.cluster_bits};
}

// The epilogue of one element: alpha, beta · c, the activation.
template <class T>
__device__ __forceinline__ void write(const SmallGemm& p, std::int64_t m, std::int64_t n, std::int64_t z,
                                      Compute<T> sum) {
  using C = Compute<T>;
  sum *= static_cast<C>(p.alpha);
  if (p.c != nullptr) {
    sum += static_cast<C>(p.beta) * widen(static_cast<const T*>(p.c)[z * p.c_batch + m * p.c_row + n * p.c_col]);
  }
  static_cast<T*>(p.out)[z * p.out_batch + m * p.out_row + n * p.out_col] = narrow<T>(activated(sum, p.activation));
}

// sums: [warp][Rows][Cols], complete for the whole CTA. Every thread of the CTA calls it.
template <class T, int Rows, int Cols>
__device__ __forceinline__ void finish(const SmallGemm& p, Compute<T>* sums, Shares shares) {
  using C = Compute<T>;
  constexpr int kArea = Rows * Cols;
  // The warps that made a tile reduce it.
  const int threads = 32 << shares.split_bits, tile = static_cast<int>(threadIdx.x) >> (5 + shares.split_bits);
  const int thread = static_cast<int>(threadIdx.x) & (threads - 1), split = shares.split();
  const std::int64_t first = std::int64_t{shares.group() * shares.tiles() + tile} * Cols;
  const std::int64_t top = std::int64_t{blockIdx.y} * kGemmRows, z = blockIdx.z;
  const int count = (p.m - top < Rows ? static_cast<int>(p.m - top) : Rows) * Cols;
  C* const own = sums + tile * split * kArea;
  const auto of_cta = [&](int i) {
    C sum = own[i];
    for (int s = 1; s < split; ++s) sum += own[s * kArea + i];
    return sum;
  };
  const auto put = [&](int i, C sum) {
    if (first + i % Cols < p.n) write<T>(p, top + i / Cols, first + i % Cols, z, sum);
  };
#if __CUDA_ARCH__ >= 900
  if constexpr (std::is_same_v<C, float>) {
    if (shares.cluster_bits > 0) {
      // Each thread writes where only it has read.
      for (int i = thread; i < count; i += threads) own[i] = of_cta(i);
      wait_for_cluster();
      for (int i = shares.rank() * threads + thread; i < count; i += threads << shares.cluster_bits) {
        float sum = at_rank(own + i, 0);
        for (int r = 1; r < shares.cluster(); ++r) sum += at_rank(own + i, r);
        put(i, sum);
      }
      wait_for_cluster();  // what others still read must not go away
      return;
    }
  }
#endif
  for (int i = thread; i < count; i += threads) put(i, of_cta(i));
}

// Doubles split-K until every SM has two CTAs, in one wave, as long as every warp finds `chunk` along k; over a
// cluster, whose barriers cost two thirds of a microsecond, while it finds `cluster_chunk`.
inline constexpr int kNoCluster = 0;
inline Shares shares_of(const SmallGemm& p, int cols, int chunk, int cluster_chunk) {
  const std::int64_t tiles = (p.n + cols - 1) / cols * ((p.m + kGemmRows - 1) / kGemmRows) * p.batch;
  const std::int64_t warps = std::int64_t{p.num_sms} * 2 * kGemmWarps;
  Shares shares;
  const auto can_double = [&](int least) {
    const std::int64_t turns = std::int64_t{shares.split()} << shares.cluster_bits;
    return tiles * turns * 2 <= warps && p.k > turns * least;
  };
  while (shares.split() < kGemmWarps && can_double(chunk)) ++shares.split_bits;
  if (!p.has_clusters || cluster_chunk == kNoCluster) return shares;
  while (shares.cluster() < kMaxCluster && can_double(cluster_chunk)) ++shares.cluster_bits;
  return shares;
}

// For kernels that call griddepcontrol_wait.
template <class Kernel>
int launch_small(Kernel* kernel, const SmallGemm& p, int cols, Shares shares, Stream stream) {
  const std::int64_t per_cta = std::int64_t{shares.tiles()} * cols;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(((p.n + per_cta - 1) / per_cta) << shares.cluster_bits),
                    static_cast<unsigned>((p.m + kGemmRows - 1) / kGemmRows), static_cast<unsigned>(p.batch));
  how.threads = kGemmThreads;
  how.cluster = shares.cluster();
  how.pdl = p.pdl;
  return launch_kernel(kernel, how, stream, p, shares);
}

// One per file, so that they build in parallel. b's columns (rows) are dense, see small_path.
int gemm_rows_half(const SmallGemm& p, Stream stream);
int gemm_rows_bulk(const SmallGemm& p, Stream stream);  // where takes_bulk says so
int gemm_columns_half(const SmallGemm& p, Stream stream);
int gemm_rows_float(const SmallGemm& p, Stream stream);
int gemm_columns_float(const SmallGemm& p, Stream stream);

}  // namespace untorch::kernels::cuda
