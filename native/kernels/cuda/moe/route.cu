// MoE routing: a stable counting sort of pairs by expert in one CTA, the tiles in M, and a padded copy of x, in NVFP4
// with permuted k.
//
// CTA 0 sorts, 256 experts at a time. A warp has a contiguous range of pairs and a row of counters in shared memory, so
// there are no atomics: __match_any_sync finds the lanes with the same expert, and the first of them counts for all.
// Counters are scanned over warps, then over experts, and are the offsets of the second pass. The other CTAs copy x: a
// thread writes 16 bytes of a row, eight k that are permuted or neighbours.
//
//   shared memory   counters [32 warps][256 experts], starts [257], first_tiles [257], warp totals
//
// Bytes: 8 a pair (4 of ids twice, for every 256 experts; 4 of the result), 16 a tile; x once read and once written.
// Operations: some 30 instructions for 32 pairs, serially in a warp. For few tokens it is latency-bound: a launch and
// some round trips to memory; the copy of x runs beside it.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/moe_weight.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 1024, kWarps = kThreads / 32;
constexpr int kChunk = 256;  // experts at a time
constexpr unsigned kAllLanes = 0xffffffffu;

// Shared memory: counters, then the first row and tile of each expert (and the end), then totals of warps.
constexpr int kCounters = kWarps * kChunk, kStarts = kCounters, kFirstTiles = kStarts + kChunk + 1,
              kWarpRows = kFirstTiles + kChunk + 1, kWarpTiles = kWarpRows + kChunk / 32,
              kSharedInts = kWarpTiles + kChunk / 32;

// Pairs of a warp: body(pair, id, bin), bin the expert's index in this chunk of experts, or -1.
template <class Body>
__device__ __forceinline__ void for_pairs(const W4A16Moe& p, int first, int begin, int end, Body&& body) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int i = begin; i < end; i += 32) {
    const int pair = i + lane, id = pair < end ? p.topk_ids[pair] : -1;
    const bool here = id >= first && id < first + kChunk && id < p.experts;
    body(pair, id, here ? id - first : -1);
  }
}

__device__ void sort_pairs(const W4A16Moe& p, int* memory) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int pairs = static_cast<int>(p.tokens * p.top_k), experts = static_cast<int>(p.experts);
  const int run = (pairs + kThreads - 1) / kThreads * 32;  // of a warp
  const int warps = (pairs + run - 1) / run, begin = warp * run, end = begin + run < pairs ? begin + run : pairs;
  int* const counters = memory + warp * kChunk;
  int *const starts = memory + kStarts, *const first_tiles = memory + kFirstTiles;
  const unsigned before_me = (1u << lane) - 1;
  int row = 0, tile = 0;  // what the chunks before have taken
  for (int first = 0; first < experts || first == 0; first += kChunk) {
    for (int i = thread; i < warps * kChunk; i += kThreads) memory[i] = 0;
    __syncthreads();
    for_pairs(p, first, begin, end, [&](int, int id, int bin) {
      if (first == 0 && (id < -1 || id >= experts)) report(p.fault, p.id_fault, id);
      const unsigned same = __match_any_sync(kAllLanes, bin);
      if (bin >= 0 && (same & before_me) == 0) counters[bin] += __popc(same);
      __syncwarp();
    });
    __syncthreads();
    int rows = 0, tiles = 0;
    if (thread < kChunk) {
      for (int w = 0; w < warps; ++w) {
        const int count = memory[w * kChunk + thread];
        memory[w * kChunk + thread] = rows;
        rows += count;
      }
      tiles = (rows + p.tile_m - 1) / p.tile_m;
      for (int step = 1; step < 32; step *= 2) {
        const int more_rows = __shfl_up_sync(kAllLanes, rows, step),
                  more_tiles = __shfl_up_sync(kAllLanes, tiles, step);
        if (lane >= step) rows += more_rows, tiles += more_tiles;
      }
      if (lane == 31) memory[kWarpRows + warp] = rows, memory[kWarpTiles + warp] = tiles;
    }
    __syncthreads();
    if (thread < kChunk) {
      rows += row, tiles += tile;
      for (int w = 0; w < warp; ++w) rows += memory[kWarpRows + w], tiles += memory[kWarpTiles + w];
      starts[thread + 1] = rows, first_tiles[thread + 1] = tiles;
      if (thread == 0) starts[0] = row, first_tiles[0] = tile;
    }
    __syncthreads();
    for_pairs(p, first, begin, end, [&](int pair, int, int bin) {
      const unsigned same = __match_any_sync(kAllLanes, bin);
      const int at = bin >= 0 ? starts[bin] + counters[bin] + __popc(same & before_me) : 0;
      __syncwarp();
      if (bin >= 0) {
        p.sorted_pairs[at] = pair;
        if ((same & before_me) == 0) counters[bin] += __popc(same);
      }
      __syncwarp();
    });
    const int last = first_tiles[kChunk];
    for (int b = tile + thread; b < last; b += kThreads) {
      int low = 0, high = kChunk;  // the last expert whose first tile is not after b
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (first_tiles[middle] <= b ? low : high) = middle;
      }
      const int at = starts[low] + (b - first_tiles[low]) * p.tile_m, left = starts[low + 1] - at;
      p.tiles[b] = {first + low, at, left < p.tile_m ? left : p.tile_m, 0};
    }
    row = starts[kChunk], tile = last;
    __syncthreads();
  }
  for (int b = tile + thread; b < p.num_tiles; b += kThreads) p.tiles[b] = {-1, 0, 0, 0};
}

// Eight positions of a row, zeros behind its last k.
__device__ void copy_activations(const W4A16Moe& p, std::int64_t index) {
  const std::int64_t row_chunks = p.copied_stride / 8, token = index / row_chunks;
  const int chunk = static_cast<int>(index - token * row_chunks);
  const auto* const from = static_cast<const std::uint16_t*>(p.x) + token * p.x_stride;
  struct alignas(16) Eight {
    std::uint16_t values[8];
  } out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int position = chunk % 8 * 8 + i,
              k = chunk / 8 * kMoeKGroup + (p.permutes_k ? permuted_k(position) : position);
    out.values[i] = k < p.k ? from[k] : std::uint16_t{0};
  }
  *reinterpret_cast<Eight*>(static_cast<char*>(p.copied_x) + index * 16) = out;
}

__global__ void __launch_bounds__(kThreads) moe_route_kernel(W4A16Moe p, std::int64_t chunks) {
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  if (blockIdx.x == 0) {
    sort_pairs(p, reinterpret_cast<int*>(memory));
    return;
  }
  const std::int64_t index = std::int64_t{blockIdx.x - 1} * kThreads + threadIdx.x;
  if (index < chunks) copy_activations(p, index);
}

}  // namespace

int moe_route(const W4A16Moe& p, Stream stream) {
  if (p.pairs() == 0) return 0;
  if (p.pairs() > kMoeMaxPairs || p.experts > kMoeMaxPairs) return kNoKernel;
  const std::int64_t chunks = p.dtype == DType::kFloat32 ? 0 : p.tokens * p.copied_stride / 8;
  const unsigned copies = chunks > 0 ? blocks_for(chunks, kThreads) : 0;
  moe_route_kernel<<<1 + copies, kThreads, kSharedInts * sizeof(int), stream>>>(p, chunks);
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
