// Rings of shared memory that bulk copies fill: how GEMVs of large weights read them (small_m_bulk.cu, w8_gemv.cu).
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
#endif

}  // namespace untorch::kernels::cuda
