// Work that is shared evenly between thread blocks which are all there at a time: tiles, and within them blocks of k.
//
// Every multiprocessor has one block, and all have the same number of blocks of k, in a row: tiles one after the other,
// the last one first. So a tile may be shared by several thread blocks. Whoever has its end adds up what the others
// left in global memory, in the order of k; they did that tile first and have nobody to wait for. The warps that
// multiply wait for global memory only to read those sums: a warp of its own tells others of sums that were left, and
// watches for theirs. While memory is busy, a wait for what was written took up to 5 µs.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/cuda/sm90/mbarrier.cuh"

namespace untorch::kernels::cuda {
namespace {

// The work: blocks of 128 k's of all tiles, a row of tiles after the other, shared evenly.
struct Work {
  int column_tiles = 0, depth = 0;
  int share = 0, longer = 0;            // blocks of k of a thread block; one more for each of the first `longer`
  float* partials = nullptr;            // [thread block][Rows / 8][threads that multiply][4]
  unsigned long long* flags = nullptr;  // [thread block]: `token` when its partial sums are there
  unsigned long long token = 0;         // of this launch alone

  __device__ __forceinline__ int begin_of(int block) const { return block * share + (block < longer ? block : longer); }
  // The first thread block with a part of the tile that begins there, of those before `own`.
  __device__ __forceinline__ int first_of(int tile_begin, int own) const {
    int first = own - 1;
    while (begin_of(first) > tile_begin) --first;
    return first;
  }
};

// What a thread block does of a tile: the blocks of k [from, to).
struct Segment {
  int tile, from, to;
};
__device__ __forceinline__ Segment segment_before(const Work& work, int begin, int stop) {
  const int tile = (stop - 1) / work.depth, first = tile * work.depth;
  return {tile, (begin > first ? begin : first) - first, stop - first};
}

__device__ __forceinline__ unsigned long long flag_at(const unsigned long long* flag) {
  unsigned long long value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void raise_flag(unsigned long long* flag, unsigned long long value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

// By one thread: raises the thread block's flag when all of its warps have arrived at `left`; arrives at `ready` when
// all others have left their sums of the tile that this thread block ends, if there are any.
__device__ __forceinline__ void exchange_partials(const Work& work, std::uint32_t left, std::uint32_t ready) {
  const auto own = static_cast<int>(blockIdx.x);
  const int begin = work.begin_of(own), stop = work.begin_of(own + 1), tile_begin = begin / work.depth * work.depth;
  if (stop % work.depth != 0) {
    wait_at(left, 0);
    raise_flag(work.flags + own, work.token);
  }
  if (begin == tile_begin || stop < tile_begin + work.depth) return;
  for (int other = work.first_of(tile_begin, own); other < own; ++other) {
    while (flag_at(work.flags + other) != work.token) {
    }
    work.flags[other] = 0;  // a graph's next replay has the same token
  }
  arrive_at(ready);
}

// Leaves the sums for whoever has the tile's end.
template <int kMultiply, int Sums>
__device__ __forceinline__ void leave_partial(const Work& work, const float (&acc)[Sums], std::uint32_t left) {
  const auto own = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  auto* const to = reinterpret_cast<float4*>(work.partials) + std::int64_t{own} * (Sums / 4) * kMultiply + thread;
#pragma unroll
  for (int i = 0; i < Sums / 4; ++i) {
    to[i * kMultiply] = float4{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
  }
  __syncwarp();
  if (thread % 32 == 0) arrive_at(left);
}

// Adds what other thread blocks did of the tile whose rest this one has.
template <int kMultiply, int Sums>
__device__ __forceinline__ void add_partials(const Work& work, int tile_begin, float (&acc)[Sums],
                                             std::uint32_t ready) {
  const auto own = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int first = work.first_of(tile_begin, own);
  wait_at(ready, 0);
  // Several at a time are under way; they are added one after the other.
  constexpr int kBatch = Sums <= 8 ? 4 : Sums <= 16 ? 2 : 1;
  const auto* const from = reinterpret_cast<const float4*>(work.partials) + thread;
  for (int other = first; other < own; other += kBatch) {
    float4 part[kBatch][Sums / 4];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
#pragma unroll
      for (int i = 0; i < Sums / 4; ++i) {
        if (other + b < own) part[b][i] = __ldcg(from + (std::int64_t{other + b} * (Sums / 4) + i) * kMultiply);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (other + b >= own) break;
#pragma unroll
      for (int i = 0; i < Sums / 4; ++i) {
        const float4 v = part[b][i];
        acc[4 * i] += v.x, acc[4 * i + 1] += v.y, acc[4 * i + 2] += v.z, acc[4 * i + 3] += v.w;
      }
    }
  }
}

// Of this process and launch: what a flag held before is something else.
inline unsigned long long fresh_token() {
  static std::atomic<unsigned long long> count{
      static_cast<unsigned long long>(std::chrono::steady_clock::now().time_since_epoch().count())};
  unsigned long long z = count.fetch_add(0x9e3779b97f4a7c15ull) + 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return (z ^ (z >> 31)) | 1;
}

}  // namespace
}  // namespace untorch::kernels::cuda
