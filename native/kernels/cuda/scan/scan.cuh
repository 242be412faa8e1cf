// Inclusive scans along rows, by shuffles in a warp and carries between tiles, over a policy that loads, combines and
// stores. Roofline: memory-bound; the input read once and the result written once, few long rows read the input twice.
//
//   tile of a CTA: 8 warps x 8 vectors x 32 lanes; vector v of warp w holds elements (w*8 + v)*32 ... +31
//
// - Rows whose elements are neighbours: a warp holds 256 elements, eight vectors of 32 neighbours, so that loads and
//   stores are coalesced with no transposition; each vector is scanned by shuffles, then the carries are added. Rows of
//   up to 256 elements take a warp, longer ones a CTA of eight warps, tile after tile with a carry.
// - Rows whose elements are apart while the rows are neighbours: a row a thread.
// - Few, long rows are cut into chunks: one pass for the chunks' totals, one that starts each chunk from the totals
//   before it. (A look-back would read once only, but combine in an order that changes from run to run.)
//
// A policy has: State; State identity(); State load(at, i) and store(at, i, state) for element i of the row whose
// offsets are `at`; State combine(earlier, later); kOperands.
#pragma once

#include "base/lanes.h"
#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda::scan {

constexpr int kThreads = 256, kWarps = kThreads / 32, kItems = 8, kWarpTile = 32 * kItems, kTile = kWarps * kWarpTile;
// Chunks a row at most: their totals are one tile.
constexpr std::int64_t kMaxChunks = 512;
static_assert(kMaxChunks <= kTile);
constexpr std::size_t kStateBytes = 16;

struct Chunks {
  std::int64_t count = 1, length = 0;
};

// Along rows: chunks of whole tiles, when the rows alone leave the GPU idle.
inline Chunks row_chunks(std::int64_t rows, std::int64_t n) {
  Chunks out{1, n};
  if (rows >= 256 || n < 8 * kTile) return out;
  std::int64_t wanted = kMaxChunks / (rows < 1 ? 1 : rows);
  const std::int64_t tiles = (n + kTile - 1) / kTile, most = tiles / 2;
  if (wanted > most) wanted = most;
  if (wanted < 2) return out;
  out.length = (tiles + wanted - 1) / wanted * kTile;
  out.count = (n + out.length - 1) / out.length;
  return out;
}

// A row a thread: 16384 threads or so.
inline Chunks column_chunks(std::int64_t rows, std::int64_t n) {
  Chunks out{1, n};
  if (rows >= 16384 || n < 256) return out;
  std::int64_t wanted = 16384 / (rows < 1 ? 1 : rows);
  if (wanted > 256) wanted = 256;
  if (wanted > n / 64) wanted = n / 64;
  if (wanted < 2) return out;
  out.length = (n + wanted - 1) / wanted;
  out.count = (n + out.length - 1) / out.length;
  return out;
}

#ifdef __CUDACC__

// Any trivially copyable value, in words of 32 bits.
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int by) {
  static_assert(sizeof(T) % 4 == 0);
  union Words {
    T value;
    std::uint32_t words[sizeof(T) / 4];
    __device__ Words() {}
  } in, out;
  in.value = value;
#pragma unroll
  for (unsigned w = 0; w < sizeof(T) / 4; ++w) out.words[w] = __shfl_up_sync(0xffffffff, in.words[w], by);
  return out.value;
}

template <class T>
__device__ __forceinline__ T shuffle_from(T value, int lane) {
  union Words {
    T value;
    std::uint32_t words[sizeof(T) / 4];
    __device__ Words() {}
  } in, out;
  in.value = value;
#pragma unroll
  for (unsigned w = 0; w < sizeof(T) / 4; ++w) out.words[w] = __shfl_sync(0xffffffff, in.words[w], lane);
  return out.value;
}

// states[j] belongs to element 32·j + lane: afterwards each holds everything up to its element, and the result is the
// total. All lanes take part.
template <class P>
__device__ __forceinline__ typename P::State scan_warp_tile(const P& policy, typename P::State (&states)[kItems]) {
  using State = typename P::State;
  const int lane = static_cast<int>(threadIdx.x % 32);
  State total = policy.identity();
#pragma unroll
  for (int j = 0; j < kItems; ++j) {
    State mine = states[j];
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const State earlier = shuffle_up(mine, by);
      if (lane >= by) mine = policy.combine(earlier, mine);
    }
    states[j] = policy.combine(total, mine);
    total = shuffle_from(states[j], 31);
  }
  return total;
}

// The same over the CTA's tile; `warps` is free again after the next barrier. `before` is what comes before the
// warp's part of the tile.
template <class P>
__device__ __forceinline__ typename P::State scan_block_tile(const P& policy, typename P::State (&states)[kItems],
                                                             typename P::State* warps, typename P::State& before) {
  using State = typename P::State;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const State mine = scan_warp_tile(policy, states);
  if (threadIdx.x % 32 == 0) warps[warp] = mine;
  __syncthreads();
  State total = policy.identity();
  before = total;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before = total;
    total = policy.combine(total, warps[w]);
  }
  return total;
}

// A row a warp.
template <class P>
__global__ void __launch_bounds__(kThreads) scan_short_rows(P policy) {
  using State = typename P::State;
  const std::int64_t n = policy.lanes.n;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t step = std::int64_t{gridDim.x} * kWarps;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < policy.lanes.rows.numel;
       row += step) {
    std::int64_t at[P::kOperands];
    offsets(policy.lanes.rows, row, at);
    State states[kItems];
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = 32 * j + lane;
      states[j] = i < n ? policy.load(at, i) : policy.identity();
    }
    scan_warp_tile(policy, states);
#pragma unroll
    for (int j = 0; j < kItems; ++j) {
      const int i = 32 * j + lane;
      if (i < n) policy.store(at, i, states[j]);
    }
  }
}

// A CTA a chunk of a row (blockIdx.y: the chunk). `totals`: rows × chunks, null when a row is one chunk; they are
// made when `only_totals` is set, else they are read.
template <class P>
__global__ void __launch_bounds__(kThreads)
    scan_long_rows(P policy, Chunks chunks, typename P::State* totals, bool only_totals) {
  using State = typename P::State;
  __shared__ __align__(16) unsigned char memory[3 * kWarps * sizeof(State)];
  auto* const warps = reinterpret_cast<State*>(memory);
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  const int first = warp * kWarpTile + lane;
  const std::int64_t begin = blockIdx.y * chunks.length, limit = begin + chunks.length,
                     end = limit < policy.lanes.n ? limit : policy.lanes.n;
  for (std::int64_t row = blockIdx.x; row < policy.lanes.rows.numel; row += gridDim.x) {
    std::int64_t at[P::kOperands];
    offsets(policy.lanes.rows, row, at);
    State carry = policy.identity(), before, states[kItems];
    if (totals != nullptr && !only_totals) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const int c = first + 32 * j;
        states[j] = c < static_cast<int>(blockIdx.y) ? totals[row * chunks.count + c] : policy.identity();
      }
      carry = scan_block_tile(policy, states, warps + 2 * kWarps, before);
    }
    int turn = 0;  // two sets of warp totals in turn: one barrier a tile
    for (std::int64_t tile = begin; tile < end; tile += kTile, turn ^= 1) {
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        const std::int64_t i = tile + first + 32 * j;
        states[j] = i < end ? policy.load(at, i) : policy.identity();
      }
      const State total = scan_block_tile(policy, states, warps + turn * kWarps, before);
      if (!only_totals) {
        const State start = policy.combine(carry, before);
#pragma unroll
        for (int j = 0; j < kItems; ++j) {
          const std::int64_t i = tile + first + 32 * j;
          if (i < end) policy.store(at, i, policy.combine(start, states[j]));
        }
      }
      carry = policy.combine(carry, total);
    }
    if (only_totals && threadIdx.x == 0) totals[row * chunks.count + blockIdx.y] = carry;
    __syncthreads();
  }
}

// A row a thread; totals: chunks × rows.
template <class P>
__global__ void __launch_bounds__(kThreads)
    scan_columns(P policy, Chunks chunks, typename P::State* totals, bool only_totals) {
  using State = typename P::State;
  const std::int64_t rows = policy.lanes.rows.numel, begin = blockIdx.y * chunks.length, limit = begin + chunks.length,
                     end = limit < policy.lanes.n ? limit : policy.lanes.n;
  const std::int64_t step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t row = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; row < rows; row += step) {
    std::int64_t at[P::kOperands];
    offsets(policy.lanes.rows, row, at);
    State carry = policy.identity();
    if (totals != nullptr && !only_totals) {
      for (unsigned c = 0; c < blockIdx.y; ++c) carry = policy.combine(carry, totals[c * rows + row]);
    }
    std::int64_t i = begin;
    for (; i + kItems <= end; i += kItems) {  // the loads are in flight together
      State states[kItems];
#pragma unroll
      for (int j = 0; j < kItems; ++j) states[j] = policy.load(at, i + j);
#pragma unroll
      for (int j = 0; j < kItems; ++j) {
        carry = policy.combine(carry, states[j]);
        if (!only_totals) policy.store(at, i + j, carry);
      }
    }
    for (; i < end; ++i) {
      carry = policy.combine(carry, policy.load(at, i));
      if (!only_totals) policy.store(at, i, carry);
    }
    if (only_totals) totals[std::int64_t{blockIdx.y} * rows + row] = carry;
  }
}

// The operand whose layout decides is the last one: the input.
template <class P>
int run(const P& policy, void* scratch, Stream stream) {
  using State = typename P::State;
  static_assert(sizeof(State) <= kStateBytes);
  const std::int64_t rows = policy.lanes.rows.numel, n = policy.lanes.n;
  if (rows == 0 || n == 0) return 0;
  auto* const totals = static_cast<State*>(scratch);
  constexpr int kInput = P::kOperands - 1;
  const bool along = policy.lanes.step[kInput] == 1 || n == 1 || (rows < 32 && n > 32);
  if (along && n > 32) {
    if (n <= kWarpTile) {
      scan_short_rows<<<blocks_for(rows, kWarps), kThreads, 0, stream>>>(policy);
      return cudaGetLastError();
    }
    const Chunks chunks = row_chunks(rows, n);
    const dim3 grid(blocks_for(rows, 1), static_cast<unsigned>(chunks.count));
    if (chunks.count == 1) {
      scan_long_rows<<<grid, kThreads, 0, stream>>>(policy, chunks, static_cast<State*>(nullptr), false);
      return cudaGetLastError();
    }
    scan_long_rows<<<grid, kThreads, 0, stream>>>(policy, chunks, totals, true);
    scan_long_rows<<<grid, kThreads, 0, stream>>>(policy, chunks, totals, false);
    return cudaGetLastError();
  }
  const Chunks chunks = column_chunks(rows, n);
  const dim3 grid(blocks_for(rows, kThreads), static_cast<unsigned>(chunks.count));
  if (chunks.count == 1) {
    scan_columns<<<grid, kThreads, 0, stream>>>(policy, chunks, static_cast<State*>(nullptr), false);
    return cudaGetLastError();
  }
  scan_columns<<<grid, kThreads, 0, stream>>>(policy, chunks, totals, true);
  scan_columns<<<grid, kThreads, 0, stream>>>(policy, chunks, totals, false);
  return cudaGetLastError();
}

#endif

}  // namespace untorch::kernels::cuda::scan
