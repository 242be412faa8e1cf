// Work that is shared evenly between thread blocks which are all there at a time: tiles, and within them blocks of k.
//
// Every multiprocessor has one block, and all have the same number of blocks of k, in a row: tiles one after the other,
// the last one first. So a tile may be shared by several thread blocks. Whoever has its end adds up what the others
// left in global memory, in the order of k; they did that tile first and have nobody to wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "kernels/cuda/shared_barrier.cuh"

namespace untorch::kernels::cuda {
namespace {

// The work: blocks of 128 k's of all tiles, a row of tiles after the other, shared evenly.
struct Work {
  int column_tiles = 0, depth = 0, units = 0;
  float* partials = nullptr;            // [thread block][Rows / 8][threads that multiply][4]
  unsigned long long* flags = nullptr;  // [thread block]: `token` when its partial sums are there
  unsigned long long token = 0;         // of this launch alone

  __device__ __forceinline__ int begin_of(int block) const {
    return static_cast<int>(static_cast<long long>(block) * units / static_cast<int>(gridDim.x));
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

// Adds what other thread blocks did of the tile before `first`, the begin of this one's work.
template <int kMultiply, int Sums>
__device__ __forceinline__ void add_partials(const Work& work, int tile_begin, float (&acc)[Sums]) {
  const auto own = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  int lowest = own - 1;
  while (work.begin_of(lowest) > tile_begin) --lowest;
  if (thread == 0) {
    for (int other = lowest; other < own; ++other) {
      while (flag_at(work.flags + other) != work.token) {
      }
      work.flags[other] = 0;  // a graph's next replay has the same token
    }
  }
  wait_for_threads<kMultiply>();
  // Several at a time are under way; they are added one after the other.
  constexpr int kBatch = Sums <= 8 ? 4 : Sums <= 16 ? 2 : 1;
  const auto* const from = reinterpret_cast<const float4*>(work.partials) + thread;
  for (int other = lowest; other < own; other += kBatch) {
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

template <int kMultiply, int Sums>
__device__ __forceinline__ void leave_partial(const Work& work, const float (&acc)[Sums]) {
  const auto own = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  auto* const to = reinterpret_cast<float4*>(work.partials) + std::int64_t{own} * (Sums / 4) * kMultiply + thread;
#pragma unroll
  for (int i = 0; i < Sums / 4; ++i) {
    to[i * kMultiply] = float4{acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]};
  }
  __threadfence();
  wait_for_threads<kMultiply>();
  if (thread == 0) raise_flag(work.flags + own, work.token);
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
