// Grouped GEMM for mixture of experts on sm_90a: a warp-specialised persistent kernel, WGMMA from shared memory, TMA.
//
// Rows of x [m, k] are sorted by group; group g multiplies its rows with weight g, [k, n] in either order. The
// operands are swapped: the weight is WGMMA's A operand (M of the instruction: 64 columns of the weight), rows of x are
// its N, 16 to 256. So a group with few rows wastes little, and a tile has as many rows as its group needs.
//
//   schedule     each CTA reads the ends of the groups, cuts a group into tiles of equal height, and takes the
//                tiles blockIdx, blockIdx + gridDim, …; tiles of the same weights come one after another
//   producer     1 thread: waits for empty[s], issues the TMA loads of stage s (64 k), which complete full[s]
//   consumers    warpgroups of 64 columns: wait for full[s], four WGMMAs, arrive at empty[s - 1]
//   epilogue     stmatrix to shared memory, 16-byte stores of rows of 64 columns; rows of other groups are left out
//
//   a stage in shared memory
//     weight   [TileN][64] or, n-major, TileN / 64 times [64 k][64 n]    rows of 128 bytes, 128-byte swizzle
//     x        [TileM][64]                                              likewise; a tile loads the rows that it needs
//
// Two configurations. Few rows a group: TileN 64, up to 64 rows a tile, two CTAs an SM, for the bandwidth of memory:
// the weights of the groups that have rows are read once. Many: TileN 128, up to 256 rows, one CTA an SM.
//
// Roofline: 2·m·n·k operations on tensor cores; bytes of the weights that have rows, x and out. Below about 300 rows a
// group on an H100 memory is the bound.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/gemm/grouped.h"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/store_columns.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/sm90/warps.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kBlockK = 64;

constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // of a thread, after setmaxnreg

template <int Warpgroups, int TileM, int BoxM, int Stages, int CtasPerSm>
struct Config {
  static constexpr int kWarpgroups = Warpgroups, kTileN = 64 * Warpgroups, kTileM = TileM, kBoxM = BoxM,
                       kStages = Stages, kCtasPerSm = CtasPerSm;
  static constexpr bool kReallocatesRegisters = TileM > 128;  // setmaxnreg, which acts on whole warpgroups
  static constexpr int kConsumerThreads = 128 * Warpgroups,
                       kThreads = kConsumerThreads + (kReallocatesRegisters ? 128 : 32);
  static constexpr int kWeightBytes = kTileN * 128, kXBytes = TileM * 128, kStageBytes = kWeightBytes + kXBytes;
  static constexpr int kEpilogue = Stages * kStageBytes, kBarriers = kEpilogue + Warpgroups * kStoreBytes,
                       kSchedule = kBarriers + 2 * Stages * 8;
  static constexpr int shared_bytes(int groups) { return 1024 + kSchedule + groups * 8; }  // 1024: to align the start
};
using FewRows = Config<1, 64, 16, 6, 2>;
using ManyRows = Config<2, 256, 32, 4, 1>;

struct Maps {
  TensorMap x, weight;
};

// Rows [row, row + rows) of one group, columns from n0 on.
struct GroupTile {
  int group, row, rows, n0;
};

// The ends of the groups and of their tiles, in shared memory.
template <class C>
struct Schedule {
  int* row_end;
  int* tile_end;
  int groups, tiles_n;

  __device__ __forceinline__ static int tiles_of(int rows) { return (rows + C::kTileM - 1) / C::kTileM; }
  __device__ __forceinline__ int tiles() const { return tile_end[groups - 1]; }

  // By one warp; a lane has groups that lie side by side.
  __device__ __forceinline__ void fill(const GroupedGemm& p, int lane) {
    const int share = (groups + 31) / 32, begin = lane * share, end = min(begin + share, groups);
    // No read-only loads: with PDL the kernel before may have written the ends while this one had begun.
    const volatile int* const ends = static_cast<const int*>(p.ends);
    int last = 0;
#pragma unroll 4
    for (int g = begin; g < end; ++g) {
      const int row = max(0, min(ends[g * p.ends_stride], static_cast<int>(p.m)));
      row_end[g] = row;
      last = max(last, row);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, last, step);
      if (lane >= step) last = max(last, other);
    }
    int row = __shfl_up_sync(0xffffffffu, last, 1), count = 0;
    if (lane == 0) row = 0;
    for (int g = begin; g < end; ++g) {
      const int to = max(row, row_end[g]);
      count += tiles_of(to - row) * tiles_n;
      row_end[g] = to, tile_end[g] = count;
      row = to;
    }
    int sum = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    for (int g = begin; g < end; ++g) tile_end[g] += sum - count;
  }

  // The tile with this number; from_group: its group, or one before it.
  __device__ __forceinline__ GroupTile find(int tile, int from_group) const {
    int low = from_group, high = groups - 1;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile_end[middle] > tile) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int begin = low == 0 ? 0 : row_end[low - 1], rows = row_end[low] - begin;
    const int index = tile - (low == 0 ? 0 : tile_end[low - 1]);
    const int tiles_m = tiles_of(rows), tile_rows = ((rows + tiles_m - 1) / tiles_m + 7) / 8 * 8;
    const int m = index % tiles_m;
    return {low, begin + m * tile_rows, min(tile_rows, rows - m * tile_rows), index / tiles_m * C::kTileN};
  }
};

// Where a warp or the producer is in the ring of stages.
template <class C>
struct StageRing {
  std::uint32_t base;
  int stage = 0, parity = 0;

  __device__ __forceinline__ std::uint32_t memory() const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t full(int s) const { return base + C::kBarriers + s * 8; }
  __device__ __forceinline__ std::uint32_t empty(int s) const { return full(C::kStages + s); }
  __device__ __forceinline__ void advance() {
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
};

// Rows of x that a tile loads and multiplies: as TMA boxes and WGMMA's N divide them.
template <class C>
__device__ __forceinline__ int padded_rows(int rows) {
  const int boxes = (rows + C::kBoxM - 1) / C::kBoxM;
  // N of 16, 32 and 64; or multiples of 32
  return (C::kTileM > 64 ? boxes : boxes > 2 ? 4 : boxes) * C::kBoxM;
}

template <class C, bool NMajor>
__device__ __forceinline__ void produce(const GroupedGemm& p, const Maps& maps, const Schedule<C>& schedule,
                                        StageRing<C> ring) {
  const int tiles = schedule.tiles(), k_blocks = (static_cast<int>(p.k) + kBlockK - 1) / kBlockK;
  const std::uint64_t once = l2_evict_first(), again = l2_evict_normal();
  ring.parity = 1;  // all stages are empty
  int group = 0;
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    const GroupTile tile = schedule.find(i, group);
    group = tile.group;
    const int boxes = padded_rows<C>(tile.rows) / C::kBoxM;
    const int group_begin = group == 0 ? 0 : schedule.row_end[group - 1];
    // The weights of a group with one tile of rows are read once.
    const std::uint64_t policy = schedule.row_end[group] - group_begin <= C::kTileM ? once : again;
    for (int block = 0; block < k_blocks; ++block) {
      const std::uint32_t to = ring.memory(), full = ring.full(ring.stage);
      const int k0 = block * kBlockK;
      mbarrier_wait(ring.empty(ring.stage), ring.parity);
      mbarrier_arrive_expect_tx(full, C::kWeightBytes + boxes * C::kBoxM * 128);
      if constexpr (NMajor) {
#pragma unroll
        for (int w = 0; w < C::kWarpgroups; ++w) {
          tma_load_3d(to + w * 8192, maps.weight, tile.n0 + w * 64, k0, group, full, policy);
        }
      } else {
        tma_load_3d(to, maps.weight, k0, tile.n0, group, full, policy);
      }
      for (int box = 0; box < boxes; ++box) {
        tma_load_2d(to + C::kWeightBytes + box * C::kBoxM * 128, maps.x, k0, tile.row + box * C::kBoxM, full);
      }
      ring.advance();
    }
  }
}

template <class T, class C, bool NMajor, int M>
__device__ __forceinline__ void consume_tile(const GroupedGemm& p, const GroupTile& tile, int k_blocks, int warpgroup,
                                             StageRing<C>& ring, int& part) {
  const bool arrives = threadIdx.x % 32 == 0;
  float acc[M / 2] = {};
  int before = 0;
  for (int block = 0; block < k_blocks; ++block) {
    mbarrier_wait(ring.full(ring.stage), ring.parity);
    const auto at = static_cast<std::uint32_t>(warp_uniform(static_cast<int>(ring.memory())));
    const std::uint64_t weight = full_smem_descriptor(at + warpgroup * 8192);
    const std::uint64_t x = full_smem_descriptor(at + C::kWeightBytes);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      wgmma_ss<T, NMajor>(acc, weight + step * (NMajor ? 128 : 2), x + step * 2);
    }
    wgmma_commit_group();
    wgmma_wait_group<1>();  // the block before is done
    if (block > 0 && arrives) mbarrier_arrive(ring.empty(before));
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait_group<0>();
  if (arrives) mbarrier_arrive(ring.empty(before));
  const int n0 = tile.n0 + warpgroup * 64;
  store_columns<T, M>(static_cast<T*>(p.out) + std::int64_t{tile.row} * p.out_row + n0, p.out_row, tile.rows,
                      static_cast<int>(p.n) - n0, ring.base + C::kEpilogue + warpgroup * kStoreBytes, 1 + warpgroup,
                      part, [&](int i) { return pack_halves<T>(acc[2 * i], acc[2 * i + 1]); });
}

template <class T, class C, bool NMajor>
__device__ __forceinline__ void consume(const GroupedGemm& p, const Schedule<C>& schedule, int warpgroup,
                                        StageRing<C> ring) {
  const int tiles = schedule.tiles(), k_blocks = (static_cast<int>(p.k) + kBlockK - 1) / kBlockK;
  int group = 0, part = 0;
  for (int i = static_cast<int>(blockIdx.x); i < tiles; i += static_cast<int>(gridDim.x)) {
    const GroupTile tile = schedule.find(i, group);
    group = tile.group;
    const int rows = warp_uniform(padded_rows<C>(tile.rows));
    const auto run = [&]<int M>() { consume_tile<T, C, NMajor, M>(p, tile, k_blocks, warpgroup, ring, part); };
    if constexpr (C::kTileM == 64) {
      if (rows == 16) {
        run.template operator()<16>();
      } else if (rows == 32) {
        run.template operator()<32>();
      } else {
        run.template operator()<64>();
      }
    } else {
      switch (rows / 32) {
        case 1:
          run.template operator()<32>();
          break;
        case 2:
          run.template operator()<64>();
          break;
        case 3:
          run.template operator()<96>();
          break;
        case 4:
          run.template operator()<128>();
          break;
        case 5:
          run.template operator()<160>();
          break;
        case 6:
          run.template operator()<192>();
          break;
        case 7:
          run.template operator()<224>();
          break;
        default:
          run.template operator()<256>();
      }
    }
  }
}

// Rows behind the last group, by all threads of the grid.
template <class T>
__device__ __forceinline__ void zero_rows(const GroupedGemm& p, int from) {
  const std::int64_t chunks = (p.n + 7) / 8, count = (p.m - from) * chunks;
  for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += std::int64_t{gridDim.x} * blockDim.x) {
    const std::int64_t column = i % chunks * 8;
    T* const at = static_cast<T*>(p.out) + (from + i / chunks) * p.out_row + column;
    if (column + 8 <= p.n) {
      *reinterpret_cast<uint4*>(at) = uint4{};
    } else {
      for (std::int64_t c = 0; c < p.n - column; ++c) at[c] = narrow<T>(0.0f);
    }
  }
}

template <class T, class C, bool NMajor>
__global__ void __launch_bounds__(C::kThreads, C::kCtasPerSm)
    grouped_sm90_kernel(GroupedGemm p, const __grid_constant__ Maps maps, int tiles_n) {
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  const StageRing<C> ring{base};
  const int thread = static_cast<int>(threadIdx.x), warp = warp_uniform(thread / 32);
  int* const ends = reinterpret_cast<int*>(memory + (base - start) + C::kSchedule);
  const int groups = static_cast<int>(p.groups);
  Schedule<C> schedule{ends, ends + groups, groups, tiles_n};
  if (thread < C::kStages) {
    mbarrier_init(ring.full(thread), 1);
    mbarrier_init(ring.empty(thread), C::kConsumerThreads / 32);
    fence_mbarrier_init();
  }
  if (thread == C::kConsumerThreads) prefetch_tensor_map(maps.x), prefetch_tensor_map(maps.weight);
  griddepcontrol_wait();
  if (warp == 0) schedule.fill(p, thread);
  __syncthreads();
  zero_rows<T>(p, schedule.row_end[groups - 1]);
  if (warp < C::kConsumerThreads / 32) {
    if constexpr (C::kReallocatesRegisters) setmaxnreg_inc<kConsumerRegisters>();
    consume<T, C, NMajor>(p, schedule, warp / 4, ring);
  } else {
    if constexpr (C::kReallocatesRegisters) setmaxnreg_dec<kProducerRegisters>();
    if (thread == C::kConsumerThreads) produce<C, NMajor>(p, maps, schedule, ring);
  }
}

template <class T, class C, bool NMajor>
int launch(const GroupedGemm& p, Stream stream) {
  Maps maps{};
  if (const int code = encode_tensor_map({.base = p.a,
                                          .element_bytes = 2,
                                          .rows = p.m,
                                          .columns = p.k,
                                          .row_bytes = p.a_row * 2,
                                          .box_rows = C::kBoxM,
                                          .box_columns = 64,
                                          .swizzle = true},
                                         maps.x)) {
    return code;
  }
  if (const int code = encode_tensor_map({.base = p.b,
                                          .element_bytes = 2,
                                          .rows = NMajor ? p.k : p.n,
                                          .columns = NMajor ? p.n : p.k,
                                          .row_bytes = (NMajor ? p.b_row : p.b_col) * 2,
                                          .box_rows = NMajor ? kBlockK : C::kTileN,
                                          .box_columns = 64,
                                          .swizzle = true,
                                          .matrices = p.groups,
                                          .matrix_bytes = p.b_group * 2},
                                         maps.weight)) {
    return code;
  }
  const std::int64_t tiles_n = (p.n + C::kTileN - 1) / C::kTileN;
  const std::int64_t most = tiles_n * (p.m / C::kTileM + (p.groups < p.m ? p.groups : p.m));
  if (most > 0x3fffffff) return kNoKernel;
  const std::int64_t slots = std::int64_t{p.num_sms} * C::kCtasPerSm;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(most < slots ? most : slots));
  how.threads = C::kThreads, how.shared_bytes = C::shared_bytes(static_cast<int>(p.groups));
  how.pdl = p.has_pdl;
  return launch_kernel(grouped_sm90_kernel<T, C, NMajor>, how, stream, p, maps, static_cast<int>(tiles_n));
}

template <class T>
int launch_for_rows(const GroupedGemm& p, Stream stream) {
  const bool n_major = p.b_row != 1;
  if (p.m <= p.groups * kFewRowsMean) {
    return n_major ? launch<T, FewRows, true>(p, stream) : launch<T, FewRows, false>(p, stream);
  }
  return n_major ? launch<T, ManyRows, true>(p, stream) : launch<T, ManyRows, false>(p, stream);
}

}  // namespace

int grouped_sm90(const GroupedGemm& p, Stream stream) {
  if (!has_grouped_sm90(p)) return kNoKernel;
  return p.dtype == DType::kFloat16 ? launch_for_rows<__half>(p, stream) : launch_for_rows<__nv_bfloat16>(p, stream);
}

}  // namespace untorch::kernels::cuda
