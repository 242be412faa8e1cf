// Which rows belong to which expert, and x in the order that the tensor cores take.
//
// Layout: the first block sorts the pairs by expert, stably, 256 experts at a time. Each of its warps has a run of
// neighbouring pairs and a row of counters in shared memory, so no two threads count in the same place; the lanes that
// have the same expert find each other by a match, and the first of them counts for all. Counters are summed over
// warps, then over experts, and become the places where the warp's pairs go in a second pass. The other blocks of the
// launch copy x: a thread makes 16 bytes of a row, eight k's that are four apart or sixteen.
//
// Bytes: 8 a pair (twice 4 of ids, for every 256 experts, 4 of the result), 16 a block of rows; x once read and once
// written. Operations: some 30 instructions for 32 pairs, one after the other in a warp. It is latency: a launch and
// some trips to memory, for few tokens; the copy of x runs beside it.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/moe/nvfp4_mainloop.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kChunk = 256;  // experts at a time
constexpr unsigned kAllLanes = 0xffffffffu;

// Shared memory: counters, then where each expert's rows and blocks begin (and the last one's end), then sums of warps.
constexpr int kCounters = kWarps * kChunk, kStarts = kCounters, kFirstBlocks = kStarts + kChunk + 1,
              kWarpRows = kFirstBlocks + kChunk + 1, kWarpBlocks = kWarpRows + kChunk / 32,
              kSharedInts = kWarpBlocks + kChunk / 32;

// Pairs of one warp: body(pair, place among the experts of this chunk or -1).
template <class Body>
__device__ __forceinline__ void for_pairs(const Nvfp4Moe& p, int first, int begin, int end, Body&& body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = begin; i < end; i += 32) {
    const int pair = i + lane, id = pair < end ? p.topk_ids[pair] : -1;
    const bool here = id >= first && id < first + kChunk && id < p.experts;
    body(pair, id, here ? id - first : -1);
  }
}

__device__ void sort_pairs(const Nvfp4Moe& p, int* memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int pairs = static_cast<int>(p.tokens * p.top_k), experts = static_cast<int>(p.experts);
  const int run = (pairs + kThreads - 1) / kThreads * 32;  // of a warp
  const int warps = (pairs + run - 1) / run, begin = warp * run, end = begin + run < pairs ? begin + run : pairs;
  int* const counters = memory + warp * kChunk;
  int *const starts = memory + kStarts, *const first_blocks = memory + kFirstBlocks;
  const unsigned before_me = (1u << lane) - 1;
  int row = 0, block = 0;  // what the chunks before have taken
  for (int first = 0; first < experts || first == 0; first += kChunk) {
    for (int i = thread; i < warps * kChunk; i += kThreads) memory[i] = 0;
    __syncthreads();
    for_pairs(p, first, begin, end, [&](int, int id, int place) {
      if (first == 0 && (id < -1 || id >= experts)) report(p.fault, DeviceFault::kExpert, id);
      const unsigned same = __match_any_sync(kAllLanes, place);
      if (place >= 0 && (same & before_me) == 0) counters[place] += __popc(same);
      __syncwarp();
    });
    __syncthreads();
    int rows = 0, blocks = 0;
    if (thread < kChunk) {
      for (int w = 0; w < warps; ++w) {
        const int count = memory[w * kChunk + thread];
        memory[w * kChunk + thread] = rows;
        rows += count;
      }
      blocks = (rows + p.rows - 1) / p.rows;
      for (int step = 1; step < 32; step *= 2) {
        const int more_rows = __shfl_up_sync(kAllLanes, rows, step),
                  more_blocks = __shfl_up_sync(kAllLanes, blocks, step);
        if (lane >= step) rows += more_rows, blocks += more_blocks;
      }
      if (lane == 31) memory[kWarpRows + warp] = rows, memory[kWarpBlocks + warp] = blocks;
    }
    __syncthreads();
    if (thread < kChunk) {
      rows += row, blocks += block;
      for (int w = 0; w < warp; ++w) rows += memory[kWarpRows + w], blocks += memory[kWarpBlocks + w];
      starts[thread + 1] = rows, first_blocks[thread + 1] = blocks;
      if (thread == 0) starts[0] = row, first_blocks[0] = block;
    }
    __syncthreads();
    for_pairs(p, first, begin, end, [&](int pair, int, int place) {
      const unsigned same = __match_any_sync(kAllLanes, place);
      const int at = place >= 0 ? starts[place] + counters[place] + __popc(same & before_me) : 0;
      __syncwarp();
      if (place >= 0) {
        p.sorted[at] = pair;
        if ((same & before_me) == 0) counters[place] += __popc(same);
      }
      __syncwarp();
    });
    const int last = first_blocks[kChunk];
    for (int b = block + thread; b < last; b += kThreads) {
      int low = 0, high = kChunk;  // the last expert whose first block is not after b
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (first_blocks[middle] <= b ? low : high) = middle;
      }
      const int at = starts[low] + (b - first_blocks[low]) * p.rows, left = starts[low + 1] - at;
      p.list[b] = {first + low, at, left < p.rows ? left : p.rows, 0};
    }
    row = starts[kChunk], block = last;
    __syncthreads();
  }
  for (int b = block + thread; b < p.blocks; b += kThreads) p.list[b] = {-1, 0, 0, 0};
}

// Eight places of a row, with zeros behind its last k.
__device__ void arrange(const Nvfp4Moe& p, std::int64_t index) {
  const std::int64_t row_chunks = p.arranged_row / 8, token = index / row_chunks;
  const int chunk = static_cast<int>(index - token * row_chunks);
  const auto* const from = static_cast<const std::uint16_t*>(p.x) + token * p.x_row;
  struct alignas(16) Eight {
    std::uint16_t values[8];
  } out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int k = chunk / 8 * kMoeGroup + arranged_k(chunk % 8 * 8 + i);
    out.values[i] = k < p.k ? from[k] : std::uint16_t{0};
  }
  *reinterpret_cast<Eight*>(static_cast<char*>(p.arranged) + index * 16) = out;
}

__global__ void __launch_bounds__(kThreads) route_pairs(Nvfp4Moe p, std::int64_t chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  if (blockIdx.x == 0) {
    sort_pairs(p, reinterpret_cast<int*>(memory));
    return;
  }
  const std::int64_t index = std::int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
  if (index < chunks) arrange(p, index);
}

}  // namespace

int nvfp4_moe_route(const Nvfp4Moe& p, Stream stream) {
  if (p.pairs() == 0) return 0;
  if (p.pairs() > kMoeMostPairs || p.experts > kMoeMostPairs) return kNoKernel;
  const std::int64_t chunks = p.dtype == DType::kFloat32 ? 0 : p.tokens * p.arranged_row / 8;
  const unsigned copies = chunks > 0 ? blocks_for(chunks, kThreads) : 0;
  route_pairs<<<1 + copies, kThreads, kSharedInts * sizeof(int), stream>>>(p, chunks);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
