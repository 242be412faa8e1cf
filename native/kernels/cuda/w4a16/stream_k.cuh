// Stream-K tile scheduler of a persistent kernel, and its fix-up through global memory.
//
// The k blocks of all output tiles, tile after tile, are one sequence; CTA i has a contiguous range of it, and all
// ranges are equally long (the first `remainder` one longer). One CTA an SM, all resident:
//
//   k blocks   | tile 0          | tile 1          | tile 2          |
//   CTA        | 0         | 1         | 2         | 3               |
//                          └ 0 and 1 contribute to tile 0, 1 and 2 to tile 1: 1 reduces tile 0, 2 reduces tile 1
//
// A CTA works on its range from the end: its last tile, which another CTA ends, comes first. The last CTA of a tile, in
// the order of k, reduces the partial sums (fix-up), in the order of k. The others stored theirs as their first work
// tile and wait for no other CTA, so there is no deadlock.
//
// Consumer warps wait for global memory only to read partial sums. A warp of its own publishes the CTA's flag when its
// partial sums are stored, and polls the flags of the other contributors: while memory is busy, a wait for a store to
// become visible took up to 5 µs. Bytes: 4 · tile_m · tile_n written and read for each contributor but the last.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>

#include "kernels/cuda/sm90/mbarrier.cuh"

namespace untorch::kernels::cuda {
namespace {

// Tiles are in row-major order: the index of a tile is tile_m_index · tiles_n + tile_n_index.
struct TileScheduler {
  int tiles_n = 0, k_blocks = 0;            // k blocks of a tile
  int k_blocks_per_cta = 0, remainder = 0;  // one more for each of the first `remainder` CTAs
  float* partials = nullptr;                // [CTA][tile_m / 8][consumer threads][4]; or int32
  unsigned long long* flags = nullptr;      // [CTA]: launch_id when its partial sums are stored
  unsigned long long launch_id = 0;         // unique_launch_id

  __device__ __forceinline__ int range_begin(int cta) const {
    return cta * k_blocks_per_cta + (cta < remainder ? cta : remainder);
  }
  // The first contributor, before `cta`, to the tile whose k blocks begin at `tile_begin`.
  __device__ __forceinline__ int first_contributor(int tile_begin, int cta) const {
    int first = cta - 1;
    while (range_begin(first) > tile_begin) --first;
    return first;
  }
};

// A CTA's part of an output tile: the tile's k blocks [k_begin, k_end).
struct WorkTile {
  int tile, k_begin, k_end;
};
// The last one of the k blocks [begin, end) of the sequence.
__device__ __forceinline__ WorkTile last_work_tile(const TileScheduler& scheduler, int begin, int end) {
  const int tile = (end - 1) / scheduler.k_blocks, tile_begin = tile * scheduler.k_blocks;
  return {tile, (begin > tile_begin ? begin : tile_begin) - tile_begin, end - tile_begin};
}

__device__ __forceinline__ unsigned long long load_acquire(const unsigned long long* flag) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void store_release(unsigned long long* flag, unsigned long long value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// The fix-up warp, by one thread. Publishes this CTA's flag when all consumer warps have arrived at the mbarrier
// `partial_stored`; arrives at `partials_ready` when the other contributors to the tile that this CTA ends, if there
// are any, have published theirs.
__device__ __forceinline__ void exchange_fixup_flags(const TileScheduler& scheduler, std::uint32_t partial_stored,
                                                     std::uint32_t partials_ready) {
  const auto cta = static_cast<int>(blockIdx.x);
  const int begin = scheduler.range_begin(cta), end = scheduler.range_begin(cta + 1),
            tile_begin = begin / scheduler.k_blocks * scheduler.k_blocks;
  if (end % scheduler.k_blocks != 0) {
    mbarrier_wait(partial_stored, 0);
    store_release(scheduler.flags + cta, scheduler.launch_id);
  }
  if (begin == tile_begin || end < tile_begin + scheduler.k_blocks) return;
  for (int other = scheduler.first_contributor(tile_begin, cta); other < cta; ++other) {
    while (load_acquire(scheduler.flags + other) != scheduler.launch_id) {
    }
    scheduler.flags[other] = 0;  // a CUDA graph's next replay has the same launch_id
  }
  mbarrier_arrive(partials_ready);
}

// Stores the accumulators, float32 or int32, for the CTA that reduces the tile.
template <int ConsumerThreads, class Sum, int Accumulators>
__device__ __forceinline__ void store_partial(const TileScheduler& scheduler, const Sum (&acc)[Accumulators],
                                              std::uint32_t partial_stored) {
  const auto cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  auto* const to =
      reinterpret_cast<uint4*>(scheduler.partials) + std::int64_t{cta} * (Accumulators / 4) * ConsumerThreads + thread;
#pragma unroll
  for (int i = 0; i < Accumulators / 4; ++i) {
    uint4 four;
    memcpy(&four, acc + 4 * i, 16);
    to[i * ConsumerThreads] = four;
  }
  __syncwarp();
  if (thread % 32 == 0) mbarrier_arrive(partial_stored);
}

// Fix-up: adds the other contributors' partial sums of the tile that begins at `tile_begin`.
template <int ConsumerThreads, class Sum, int Accumulators>
__device__ __forceinline__ void reduce_partials(const TileScheduler& scheduler, int tile_begin,
                                                Sum (&acc)[Accumulators], std::uint32_t partials_ready) {
  const auto cta = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int first = scheduler.first_contributor(tile_begin, cta);
  mbarrier_wait(partials_ready, 0);
  // The loads of several contributors are in flight; the order of the additions is that of k.
  constexpr int kBatch = Accumulators <= 8 ? 4 : Accumulators <= 16 ? 2 : 1;
  const auto* const from = reinterpret_cast<const uint4*>(scheduler.partials) + thread;
  for (int other = first; other < cta; other += kBatch) {
    uint4 part[kBatch][Accumulators / 4];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < Accumulators / 4; ++i) {
        if (other + b < cta) {
          part[b][i] = __ldcg(from + (std::int64_t{other + b} * (Accumulators / 4) + i) * ConsumerThreads);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (other + b >= cta) break;
#pragma unroll
      for (int i = 0; i < Accumulators / 4; ++i) {
        Sum v[4];
        memcpy(v, &part[b][i], 16);
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[4 * i + j] += v[j];
      }
    }
  }
}

// Unique to this process and launch, so that the workspace's flags need no initialisation: what they held before is
// another value.
inline unsigned long long unique_launch_id() {
  static std::atomic<unsigned long long> count{
      static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count())};
  unsigned long long z = count.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) | 1;
}

}  // namespace
}  // namespace untorch::kernels::cuda
