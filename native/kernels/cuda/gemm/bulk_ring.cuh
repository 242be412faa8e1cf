// The skeleton of GEMVs (M up to 8) of large weights, sm_90 and newer: rings of shared memory that bulk copies fill
// (small_m_bulk.cu, w8_gemv.cu).
//
//   stage    8 columns of b, a chunk of K each: one cp.async.bulk a column, an mbarrier a stage
//
// A column's stride in a stage is 64 bytes beside a multiple of 128: the 16-byte loads of eight lanes, two columns of
// four, touch all banks once.
#pragma once

#include <algorithm>

#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"

namespace untorch::kernels::cuda {

inline constexpr int kTile = 8, kGroup = 4;
inline constexpr int kMaxStages = 12;  // of a warp
// Left beside a CTA, for those of attention and norms: the next kernel's start before this one's have ended, and this
// one's before those of the kernels before it.
inline constexpr int kSpareBytes = 48 * 1024;
inline constexpr int kMbarrierBytes = kGemmWarps * kMaxStages * 8;

// How K and shared memory are divided.
struct BulkPlan {
  int chunk = 0;       // of K
  int rounds = 0;      // chunks of a warp
  int stages = 0;      // of a warp
  int column = 0;      // bytes from column to column of a stage
  bool early = false;  // b is constant: it is loaded before the kernels before this one have ended
};

template <int Rows>
inline constexpr int kSumsBytes = 2 * kGroup * kGemmWarps * Rows * kTile * 4;

// Chunks of at most max_chunk, multiples of `step`.
inline BulkPlan bulk_plan(int k, int element_bytes, int step, int max_chunk, bool early) {
  BulkPlan plan;
  plan.rounds = (k + kGemmWarps * max_chunk - 1) / (kGemmWarps * max_chunk);
  const int share = (k + kGemmWarps * plan.rounds - 1) / (kGemmWarps * plan.rounds);
  plan.chunk = (share + step - 1) / step * step;
  plan.column = plan.chunk * element_bytes;
  if (plan.column % 128 == 0) plan.column += 64;
  plan.early = early;
  return plan;
}

// The launch of such a kernel for n columns; sets plan.stages.
template <int Rows>
Launch bulk_launch(BulkPlan& plan, std::int64_t n, int num_sms, int max_shared_bytes, bool pdl) {
  const int ring = max_shared_bytes - kSumsBytes<Rows> - kMbarrierBytes - kSpareBytes;
  plan.stages = std::min(kMaxStages, ring / (kGemmWarps * kTile * plan.column));
  const std::int64_t tiles = (n + kTile - 1) / kTile;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(std::min<std::int64_t>(tiles, num_sms)));
  how.threads = kGemmThreads;
  how.shared_bytes = kSumsBytes<Rows> + kGemmWarps * plan.stages * kTile * plan.column;
  how.pdl = pdl;
  return how;
}

// A tile's chunk of K, in the order in which a warp loads and multiplies them: groups of tiles, rounds along K, tiles
// of the group.
struct BulkUnit {
  int group = 0, round = 0, tile = 0;  // group: its first tile; tile: in the group

  __device__ __forceinline__ void advance(int tiles, int rounds) {
    const int left = tiles - group;
    if (++tile < (left < kGroup ? left : kGroup)) return;
    tile = 0;
    if (++round < rounds) return;
    round = 0;
    group += kGroup;
  }
};

#if __CUDA_ARCH__ >= 900
// `bytes`, a multiple of 16, between addresses that are aligned to 16; the mbarrier expects them.
__device__ __forceinline__ void bulk_load(std::uint32_t to, const void* from, int bytes, std::uint32_t mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :
               : "r"(to), "l"(from), "r"(bytes), "r"(mbarrier)
               : "memory");
}
__device__ __forceinline__ uint4 load_shared_16(std::uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from));
  return value;
}

// The columns of b that a GEMV multiplies: element bytes as in bulk_plan.
struct BulkColumns {
  const void* b = nullptr;
  std::int64_t column_bytes = 0;  // from one to the next, a multiple of 16
  std::int64_t n = 0;
  int k = 0;
};

// A GEMV of up to 8 rows with b's columns, by all threads of a CTA: its part of the 8-column tiles, kGroup at a time;
// warp w has of K's chunks those numbered w, w + 8, …: all of its loads, and the products with what arrived.
//
//   math.load(k0, length)                         the chunk of x at k0, to registers; lane (g, t) has row g
//   math.multiply(from, n, k0, length, acc)       adds row g's products with columns n + 2t and the next to acc[2]; the
//                                                 chunk of column n + g lies at `from` in shared memory
//   write(m, n, sum)                              for every element of Rows × n
//
// Dynamic shared memory as bulk_launch says. Some 150 KB an SM are on their way; with plan.early before the kernels
// that make x have ended (PDL).
template <int Rows, int ElementBytes, class Math, class Write>
__device__ __forceinline__ void bulk_gemv(const BulkColumns& columns, const BulkPlan& plan, Math& math, Write&& write) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ std::uint64_t mbarriers[kGemmWarps * kMaxStages];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const auto* const b = static_cast<const unsigned char*>(columns.b);
  const std::int64_t all = (columns.n + kTile - 1) / kTile;
  const std::int64_t first = all * blockIdx.x / gridDim.x;
  const int tiles = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x - first);

  float* const sums = reinterpret_cast<float*>(memory);
  const int stage_bytes = kTile * plan.column;
  const auto shared = static_cast<std::uint32_t>(__cvta_generic_to_shared(memory));
  const std::uint32_t ring = shared + kSumsBytes<Rows> + warp * plan.stages * stage_bytes;
  const auto mbarrier = static_cast<std::uint32_t>(__cvta_generic_to_shared(mbarriers + warp * kMaxStages));
  if (lane < plan.stages) mbarrier_init(mbarrier + lane * 8, 1);
  fence_mbarrier_init();
  __syncwarp();

  const auto length_of = [&](int k0) {
    const int left = columns.k - k0;
    return left < plan.chunk ? (left > 0 ? left : 0) : plan.chunk;
  };
  const auto load = [&](const BulkUnit& u, int stage) {
    const int k0 = (u.round * kGemmWarps + warp) * plan.chunk, bytes = length_of(k0) * ElementBytes;
    const std::int64_t n = (first + u.group + u.tile) * kTile, left = columns.n - n;
    const int count = left < kTile ? static_cast<int>(left) : kTile;
    if (lane == 0) mbarrier_arrive_expect_tx(mbarrier + stage * 8, count * bytes);
    __syncwarp();
    if (lane < count && bytes > 0) {
      bulk_load(ring + stage * stage_bytes + lane * plan.column,
                b + (n + lane) * columns.column_bytes + std::int64_t{k0} * ElementBytes, bytes, mbarrier + stage * 8);
    }
  };

  if (!plan.early) griddepcontrol_wait();
  BulkUnit loaded;
  for (int stage = 0; stage < plan.stages && loaded.group < tiles; ++stage) {
    load(loaded, stage);
    loaded.advance(tiles, plan.rounds);
  }
  if (plan.early) griddepcontrol_wait();

  int stage = 0, parity = 0, buffer = 0;
  for (int group = 0; group < tiles; group += kGroup, buffer ^= 1) {
    const int count = tiles - group < kGroup ? tiles - group : kGroup;
    float acc[kGroup][2] = {};
    for (int round = 0; round < plan.rounds; ++round) {
      const int k0 = (round * kGemmWarps + warp) * plan.chunk, length = length_of(k0);
      if (group == 0 || plan.rounds > 1) math.load(k0, length);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        if (i >= count) break;
        mbarrier_wait(mbarrier + stage * 8, parity);
        math.multiply(ring + stage * stage_bytes + g * plan.column, (first + group + i) * kTile, k0, length, acc[i]);
        __syncwarp();  // all lanes have read the stage
        if (loaded.group < tiles) {
          load(loaded, stage);
          loaded.advance(tiles, plan.rounds);
        }
        if (++stage == plan.stages) stage = 0, parity ^= 1;
      }
    }
    float* const own = sums + (buffer * kGroup * kGemmWarps + warp) * (Rows * kTile);
    if (g < Rows) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        float* const to = own + i * kGemmWarps * Rows * kTile + g * kTile + t * 2;
        to[0] = acc[i][0], to[1] = acc[i][1];
      }
    }
    __syncthreads();
    const int at = static_cast<int>(threadIdx.x);
    if (at < count * Rows * kTile) {
      const int tile = at / (Rows * kTile), element = at % (Rows * kTile);
      const float* const from = sums + (buffer * kGroup + tile) * kGemmWarps * Rows * kTile + element;
      float sum = from[0];
#pragma unroll
      for (int w = 1; w < kGemmWarps; ++w) sum += from[w * Rows * kTile];
      const std::int64_t n = (first + group + tile) * kTile + element % kTile;
      if (n < columns.n) write(element / kTile, n, sum);
    }
  }
}
#endif

}  // namespace untorch::kernels::cuda
