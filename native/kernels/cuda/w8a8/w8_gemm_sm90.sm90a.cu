// GEMM of 8-bit operands, int8 or E4M3, for sm_90a, any M: a warp-specialised persistent kernel, WGMMA from shared
// memory and TMA, with stream-K where whole tiles would leave SMs idle. The epilogue scales rows and columns: no sums
// go through memory but those of stream-K's fix-up.
//
// The operands are swapped: the weight is WGMMA's A operand, 64 columns of the result a warpgroup, and rows of x are
// its N. So few rows waste little, and an epilogue thread has the scales of two columns.
//
//   producer     1 thread: waits for empty[s], issues the TMA loads of stage s (128 k), which complete full[s]
//   consumers    1 or 2 warpgroups of 64 columns: wait for full[s], four WGMMAs, arrive at empty[s - 1]
//   fix-up       1 thread: flags of partial sums in global memory (stream_k.cuh)
//
//   a stage in shared memory
//     weight   [TileN][128] bytes   128-byte swizzle
//     x        [TileM][128] bytes   likewise; TMA loads of rows behind M alone are left out
//     scales   [TileM] floats       of x's rows in this k block, with scales of blocks
//
// Up to 8 rows of x in 16 bits are sums of 8-bit rows (SplitRows): TileM 16 for int8, 24 for E4M3, and the epilogue
// adds up. Tiles go in bands of kBandM tiles of rows, M first, so that what is read at a time stays in L2.
//
// Roofline: 2·M·N·K operations on tensor cores; bytes: the weight, x and out once. Share on an H200 of the data sheet's
// 1,979 TOP/s: 0.72 at 4096 × 24576, M = 2048; of its 4.8 TB/s: 0.70 there at M = 8. With x's rows for two CTAs by TMA
// multicast, in clusters, times are the same within 2 %.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/store_columns.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/sm90/warps.cuh"
#include "kernels/cuda/w4a16/stream_k.cuh"
#include "kernels/cuda/w8a8/gemm_plan.h"
#include "kernels/cuda/w8a8/wgmma_8bit.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kBlockK = kW8GemmBlockK, kBandM = 8;
constexpr int kProducerThreads = 128;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;  // of a thread, after setmaxnreg

// x: rows of 8 bits with a scale each, SplitRows, or rows with a scale for each k block of them (parts).
enum class Rows { kScaled, kSplit, kParts };

template <class W_, Rows X, int TileM_, int TileN_>
struct Config {
  using W = W_;
  static constexpr bool kSplit = X == Rows::kSplit, kParts = X == Rows::kParts;
  static constexpr int kTileM = TileM_, kTileN = TileN_;
  // Of a thread's rows of x: EpilogueScales.
  static constexpr int kScaleRows = kSplit ? 2 : (kTileM + 127) / 128;
  static constexpr int kWarpgroups = kTileN / 64, kConsumerThreads = 128 * kWarpgroups,
                       kThreads = kConsumerThreads + kProducerThreads;
  static constexpr int kBoxM = kTileM < 64 ? kTileM : 64;  // rows of a TMA load
  static constexpr int kWeightBytes = kTileN * kBlockK, kStageBytes = kWeightBytes + kTileM * kBlockK;
  static constexpr int kStages = kTileM >= 256 ? 4 : kTileM >= 192 ? 5 : kTileM >= 128 ? 6 : kTileM >= 64 ? 8 : 10;
  static constexpr int kPartsBytes = kParts ? (kTileM * 4 + 127) / 128 * 128 : 0;  // of a stage; TMA writes at 128
  static constexpr int kStore = kStages * kStageBytes, kPartScales = kStore + kWarpgroups * kStoreBytes,
                       kScales = kPartScales + kStages * kPartsBytes, kBarriers = kScales + kWarpgroups * kTileM * 4;
  static constexpr int kSharedBytes = 1024 + kBarriers + (2 * kStages + 2) * 8;  // 1024: to align the start
  static constexpr bool kReallocatesRegisters = kTileM > 128;

  // Where the scales of a stage's parts are.
  static constexpr __device__ int part_scales(int stage) { return kPartScales + stage * kPartsBytes; }
};

struct Maps {
  TensorMap x, weight, part_scales;
};

struct Schedule : TileScheduler {
  int tiles = 0, tiles_m = 0, stream_k_tiles = 0;

  // The first row and column of a tile.
  struct Origin {
    int m, n;
  };
  template <class C>
  __device__ __forceinline__ Origin origin(int tile) const {
    const int band = tile / (kBandM * tiles_n), first = band * kBandM;
    const int rows = min(kBandM, tiles_m - first), i = tile - first * tiles_n;
    return {(first + i % rows) * C::kTileM, i / rows * C::kTileN};
  }
};

// What a CTA computes, in order: its range of k blocks, then whole tiles.
struct WorkQueue {
  int begin, end, tile;

  __device__ __forceinline__ explicit WorkQueue(const Schedule& schedule)
      : begin(schedule.range_begin(static_cast<int>(blockIdx.x))),
        end(schedule.range_begin(static_cast<int>(blockIdx.x) + 1)),
        tile(schedule.stream_k_tiles + static_cast<int>(blockIdx.x)) {}
  __device__ __forceinline__ bool next(const Schedule& schedule, WorkTile& work) {
    if (end > begin) {
      work = last_work_tile(schedule, begin, end);
      end -= work.k_end - work.k_begin;
      return true;
    }
    if (tile >= schedule.tiles) return false;
    work = {tile, 0, schedule.k_blocks};
    tile += static_cast<int>(gridDim.x);
    return true;
  }
};

template <class C>
struct StageRing {
  std::uint32_t base;
  int stage = 0, parity = 0;

  __device__ __forceinline__ std::uint32_t memory() const { return base + stage * C::kStageBytes; }
  __device__ __forceinline__ std::uint32_t full(int s) const { return base + C::kBarriers + s * 8; }
  __device__ __forceinline__ std::uint32_t empty(int s) const { return full(C::kStages + s); }
  __device__ __forceinline__ std::uint32_t partial_stored() const { return full(2 * C::kStages); }
  __device__ __forceinline__ std::uint32_t partials_ready() const { return full(2 * C::kStages + 1); }
  __device__ __forceinline__ void advance() {
    stage = stage == C::kStages - 1 ? 0 : stage + 1;
    parity ^= stage == 0 ? 1 : 0;
  }
};

template <class C>
__device__ __forceinline__ void produce(const W8Gemm& p, const Maps& maps, const Schedule& schedule,
                                        StageRing<C> ring) {
  const int m = C::kSplit ? C::kTileM : static_cast<int>(p.m);
  const std::uint64_t policy = m <= C::kTileM ? l2_evict_first() : l2_evict_normal();
  ring.parity = 1;  // all stages are empty
  WorkQueue queue(schedule);
  WorkTile work;
  bool waits = true;
  while (queue.next(schedule, work)) {
    const auto [m0, n0] = schedule.origin<C>(work.tile);
    const int loads = (min(C::kTileM, m - m0) + C::kBoxM - 1) / C::kBoxM;
    const int bytes = C::kWeightBytes + loads * C::kBoxM * kBlockK + (C::kParts ? C::kTileM * 4 : 0);
    const auto load_weight = [&](const StageRing<C>& at, int k0) {
      mbarrier_arrive_expect_tx(at.full(at.stage), bytes);
      tma_load_2d(at.memory(), maps.weight, k0, n0, at.full(at.stage), policy);
    };
    int ahead = work.k_begin;  // the first k block whose weights are still to be loaded
    if (waits) {
      // With PDL a constant weight is read before the kernel that rounds x has ended.
      if (p.is_constant) {
        for (StageRing<C> at = ring; ahead < work.k_end && ahead - work.k_begin < C::kStages; ++ahead) {
          load_weight(at, ahead * kBlockK);
          at.advance();
        }
      }
      griddepcontrol_wait();
      waits = false;
    }
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      const int k0 = k_block * kBlockK;
      if (k_block >= ahead) {
        mbarrier_wait(ring.empty(ring.stage), ring.parity);
        load_weight(ring, k0);
      }
      for (int box = 0; box < loads; ++box) {
        tma_load_2d(ring.memory() + C::kWeightBytes + box * C::kBoxM * kBlockK, maps.x, k0, m0 + box * C::kBoxM,
                    ring.full(ring.stage));
      }
      if constexpr (C::kParts) {
        tma_load_2d(ring.base + C::part_scales(ring.stage), maps.part_scales, m0, k_block, ring.full(ring.stage));
      }
      ring.advance();
    }
  }
}

// The scales and the bias of an epilogue thread: two columns, and rows; those that it hands to its warpgroup, or split
// its own.
template <class C>
struct EpilogueScales {
  float row[C::kScaleRows], column[2], bias[2];
};

template <class T>
__device__ __forceinline__ float bias_at(const W8Gemm& p, int n) {
  return p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[n]);
}

// n0: the warpgroup's first column.
template <class C>
__device__ __forceinline__ EpilogueScales<C> load_scales(const W8Gemm& p, const float* row_scales, int m0, int n0) {
  EpilogueScales<C> scales;
  const int thread = static_cast<int>(threadIdx.x) % 128, column = n0 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < C::kScaleRows; ++i) {
    const int row = C::kSplit ? thread % 4 * 2 + i : thread + i * 128;
    // Not the read-only path: with PDL the kernel that wrote them may have run beside this one.
    const std::int64_t at = p.one_scale ? 0 : m0 + row;
    scales.row[i] = row >= C::kTileM || m0 + row >= p.m ? 0.0f : C::kParts ? 1.0f : __ldcg(row_scales + at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int n = column + 8 * i;
    const bool inside = n < p.n;
    scales.column[i] = !inside ? 0.0f : p.scales_row == 0 ? p.scales[p.one_scale ? 0 : n] : 1.0f;
    scales.bias[i] = !inside                       ? 0.0f
                     : p.dtype == DType::kBFloat16 ? bias_at<__nv_bfloat16>(p, n)
                     : p.dtype == DType::kFloat16  ? bias_at<__half>(p, n)
                                                   : bias_at<float>(p, n);
  }
  return scales;
}

// A warpgroup's 64 columns of a tile. Accumulators 4j to 4j + 3 of a thread are of rows 8j + 2t and the next: two of
// column g, two of column g + 8.
template <class T, class C, class Sum>
__device__ __forceinline__ void epilogue(const W8Gemm& p, int m0, int n0, std::uint32_t memory, int warpgroup,
                                         int& part, const float* rows, const EpilogueScales<C>& scales,
                                         const Sum (&acc)[C::kTileM / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128, t = thread % 4;
  const float2* const row_pairs = reinterpret_cast<const float2*>(rows) + t;
  const float column_g = scales.column[0], column_g8 = scales.column[1];
  const float bias_g = scales.bias[0], bias_g8 = scales.bias[1];
  const auto scaled = [&](int i, int c, float row) {
    return static_cast<float>(acc[i]) * (row * (c == 0 ? column_g : column_g8)) + (c == 0 ? bias_g : bias_g8);
  };
  T* const out = static_cast<T*>(p.out) + std::int64_t{m0} * p.n + n0;
  const int left_m = static_cast<int>(p.m) - m0, left_n = static_cast<int>(p.n) - n0;
  if constexpr (sizeof(T) == 2) {
    store_columns<T, C::kTileM, true>(out, p.n, left_m, left_n, memory, 1 + warpgroup, part, [&](int i) {
      const float2 pair = row_pairs[i / 2 * 4];
      return pack_halves<T>(scaled(2 * i, i % 2, pair.x), scaled(2 * i + 1, i % 2, pair.y));
    });
  } else {
    const int column = thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < C::kTileM / 4; ++i) {
      const float2 pair = row_pairs[i / 2 * 4];
      const int row = i / 2 * 8 + 2 * t, n = column + i % 2 * 8;
      if (n < left_n) {
        if (row < left_m) out[std::int64_t{row} * p.n + n] = scaled(2 * i, i % 2, pair.x);
        if (row + 1 < left_m) out[std::int64_t{row + 1} * p.n + n] = scaled(2 * i + 1, i % 2, pair.y);
      }
    }
    named_barrier_sync(1 + warpgroup, 128);  // `rows` has been read
  }
}

// The products of a row from those of its pieces: accumulators i, i + 4 and i + 8.
__device__ __forceinline__ float joined(const float (&acc)[12], int i) {
  return acc[i] + (acc[i + 4] + acc[i + 8] * (1.0f / kPieceFactorFp8)) * (1.0f / kPieceFactorFp8);
}
__device__ __forceinline__ float joined(const int (&acc)[8], int i) {
  return static_cast<float>(acc[i]) * kPieceFactorInt8 + static_cast<float>(acc[i + 4]);
}

// Likewise of SplitRows.
template <class T, class C, class Sum>
__device__ __forceinline__ void epilogue_split(const W8Gemm& p, int n0, const EpilogueScales<C>& scales,
                                               const Sum (&acc)[C::kTileM / 2]) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int row = thread % 4 * 2, column = n0 + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int m = row + i % 2, n = column + i / 2 * 8;
    const float sum = joined(acc, i) * (scales.row[i % 2] * scales.column[i / 2]) + scales.bias[i / 2];
    if (m < p.m && n < p.n) static_cast<T*>(p.out)[std::int64_t{m} * p.n + n] = narrow<T>(sum);
  }
}

// The WGMMAs of a k block, in stage `at`: sums = weight · xᵀ, or added to them.
template <class C>
__device__ __forceinline__ void multiply(const StageRing<C>& at, int warpgroup,
                                         WgmmaSum<typename C::W> (&sums)[C::kTileM / 2], bool adds) {
  const auto memory = static_cast<std::uint32_t>(warp_uniform(static_cast<int>(at.memory())));
  const std::uint64_t weight = full_smem_descriptor(memory + warpgroup * 64 * kBlockK);
  const std::uint64_t x = full_smem_descriptor(memory + C::kWeightBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kBlockK / 32; ++step) {
    wgmma_8bit<typename C::W>(sums, weight + step * 2, x + step * 2, step > 0 || adds ? 1 : 0);
  }
  wgmma_commit_group();
}

template <class C>
__device__ __forceinline__ void release(const StageRing<C>& ring, int stage) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(ring.empty(stage));
}

// Sums of the k blocks [begin, end) of a tile, in int32.
template <class C>
__device__ __forceinline__ void mainloop(const float*, int begin, int end, int warpgroup, const unsigned char*,
                                         StageRing<C>& ring, int (&acc)[C::kTileM / 2]) {
  int before = 0;
  for (int block = begin; block < end; ++block) {
    mbarrier_wait(ring.full(ring.stage), ring.parity);
    multiply<C>(ring, warpgroup, acc, block > begin);
    wgmma_wait_group<1>();  // the block before is done
    if (block > begin) release(ring, before);
    before = ring.stage;
    ring.advance();
  }
  wgmma_wait_group<0>();
  release(ring, before);
}

// Sums of E4M3 are promoted, added to float32 in registers, a k block at a time: WGMMA keeps fewer bits, and scales of
// blocks and parts are those of k blocks.
template <class C>
__device__ __forceinline__ void mainloop(const float* block_scales, int begin, int end, int warpgroup,
                                         const unsigned char* memory, StageRing<C>& ring, float (&acc)[C::kTileM / 2]) {
  constexpr int kSums = C::kTileM / 2;
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int i = 0; i < kSums; ++i) acc[i] = 0.0f;
  const auto scale_of = [&](int block) { return block_scales == nullptr || block >= end ? 1.0f : block_scales[block]; };
  float scale = scale_of(begin);
  for (int block = begin; block < end; ++block) {
    const float next = scale_of(block + 1);
    mbarrier_wait(ring.full(ring.stage), ring.parity);
    float sums[kSums];
    multiply<C>(ring, warpgroup, sums, false);
    wgmma_wait_group<0>();
    if constexpr (!C::kParts) release(ring, ring.stage);
#pragma unroll
    for (int i = 0; i < kSums; i += 2) {
      if constexpr (C::kParts) {
        const float2 rows = reinterpret_cast<const float2*>(memory + C::part_scales(ring.stage))[i / 4 * 4 + t];
        acc[i] += sums[i] * (rows.x * scale), acc[i + 1] += sums[i + 1] * (rows.y * scale);
      } else if constexpr (C::kSplit) {
        acc[i] += sums[i] * scale, acc[i + 1] += sums[i + 1] * scale;
      } else {
        acc[i] += sums[i], acc[i + 1] += sums[i + 1];
      }
    }
    if constexpr (C::kParts) release(ring, ring.stage);
    ring.advance();
    scale = next;
  }
}

template <class C>
__device__ __forceinline__ void consume(const W8Gemm& p, const float* row_scales, const Schedule& schedule,
                                        int warpgroup, unsigned char* memory, StageRing<C> ring) {
  using Sum = WgmmaSum<typename C::W>;
  const int thread = static_cast<int>(threadIdx.x) % 128;
  float* const rows = reinterpret_cast<float*>(memory + C::kScales) + warpgroup * C::kTileM;
  int part = 0;
  WorkQueue queue(schedule);
  WorkTile work;
  while (queue.next(schedule, work)) {
    const auto [m0, tile_n0] = schedule.origin<C>(work.tile);
    const int n0 = tile_n0 + warpgroup * 64;
    const EpilogueScales<C> scales = load_scales<C>(p, row_scales, m0, n0);
    const float* const block_scales =
        p.scales_row == 0 ? nullptr : p.scales + tile_n0 / static_cast<int>(kW8ScaleBlock) * p.scales_row;
    Sum acc[C::kTileM / 2];
    const int k_begin = warp_uniform(work.k_begin), k_end = warp_uniform(work.k_end);
    mainloop<C>(block_scales, k_begin, k_end, warpgroup, memory, ring, acc);
    if (k_end < schedule.k_blocks) {
      store_partial<C::kConsumerThreads>(schedule, acc, ring.partial_stored());
      continue;
    }
    if (k_begin > 0) {
      reduce_partials<C::kConsumerThreads>(schedule, work.tile * schedule.k_blocks, acc, ring.partials_ready());
    }
    const auto for_dtype = [&](auto&& body) {
      if (p.dtype == DType::kBFloat16) {
        body(__nv_bfloat16{});
      } else if (p.dtype == DType::kFloat16) {
        body(__half{});
      } else {
        body(0.0f);
      }
    };
    if constexpr (C::kSplit) {
      for_dtype([&](auto zero) { epilogue_split<decltype(zero), C>(p, n0, scales, acc); });
    } else {
#pragma unroll
      for (int i = 0; i < C::kScaleRows; ++i) {
        if (thread + i * 128 < C::kTileM) rows[thread + i * 128] = scales.row[i];
      }
      named_barrier_sync(1 + warpgroup, 128);
      const std::uint32_t store = ring.base + C::kStore + warpgroup * kStoreBytes;
      for_dtype([&](auto zero) { epilogue<decltype(zero), C>(p, m0, n0, store, warpgroup, part, rows, scales, acc); });
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    w8_gemm_sm90_kernel(W8Gemm p, const float* row_scales, const __grid_constant__ Maps maps, Schedule schedule) {
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  const StageRing<C> ring{base};
  const int thread = static_cast<int>(threadIdx.x), warp = warp_uniform(thread / 32);
  if (thread < C::kStages) {
    mbarrier_init(ring.full(thread), 1);
    mbarrier_init(ring.empty(thread), C::kConsumerThreads / 32);
  } else if (thread == C::kStages) {
    mbarrier_init(ring.partial_stored(), C::kConsumerThreads / 32);
    mbarrier_init(ring.partials_ready(), 1);
  }
  if (thread <= C::kStages) fence_mbarrier_init();
  if (thread == C::kConsumerThreads) prefetch_tensor_map(maps.x), prefetch_tensor_map(maps.weight);
  __syncthreads();
  if (warp < C::kConsumerThreads / 32) {
    if constexpr (C::kReallocatesRegisters) setmaxnreg_inc<kConsumerRegisters>();
    griddepcontrol_wait();
    consume<C>(p, row_scales, schedule, warp / 4, memory + (base - start), ring);
  } else {
    if constexpr (C::kReallocatesRegisters) setmaxnreg_dec<kProducerRegisters>();
    if (thread == C::kConsumerThreads) produce<C>(p, maps, schedule, ring);
    if (thread == C::kConsumerThreads + 32) {
      griddepcontrol_wait();
      exchange_fixup_flags(schedule, ring.partial_stored(), ring.partials_ready());
    }
  }
}

template <class C>
int launch(const W8Gemm& p, const void* x, const float* row_scales, const W8GemmPlan& plan, Stream stream) {
  Maps maps{};
  TensorMapSpec spec{.base = x,
                     .element_bytes = 1,
                     .rows = C::kSplit ? C::kTileM : p.m,
                     .columns = p.k,
                     .row_bytes = p.k,
                     .box_rows = C::kBoxM,
                     .box_columns = kBlockK,
                     .swizzle = true};
  if (const int code = encode_tensor_map(spec, maps.x)) return code;
  spec.base = p.weight, spec.rows = p.n, spec.box_rows = C::kTileN;
  if (const int code = encode_tensor_map(spec, maps.weight)) return code;
  if constexpr (C::kParts) {
    const TensorMapSpec scales{.base = row_scales,
                               .element_bytes = 4,
                               .rows = plan.k_blocks,
                               .columns = p.m,
                               .row_bytes = w8_part_scales_row(p.m) * 4,
                               .box_rows = 1,
                               .box_columns = C::kTileM};
    if (const int code = encode_tensor_map(scales, maps.part_scales)) return code;
  }
  Schedule schedule;
  schedule.tiles_n = plan.tiles_n, schedule.tiles_m = plan.tiles_m, schedule.k_blocks = plan.k_blocks;
  schedule.tiles = static_cast<int>(plan.tiles()), schedule.stream_k_tiles = plan.stream_k_tiles;
  const int k_blocks = plan.stream_k_tiles * plan.k_blocks;
  schedule.k_blocks_per_cta = k_blocks / plan.ctas, schedule.remainder = k_blocks % plan.ctas;
  if (plan.stream_k_tiles > 0) {
    schedule.flags = reinterpret_cast<unsigned long long*>(p.workspace);
    schedule.partials = p.workspace + 2 * w8_gemm_flags(p);
    schedule.launch_id = unique_launch_id();
  }
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(plan.ctas));
  how.threads = C::kThreads, how.shared_bytes = C::kSharedBytes;
  how.pdl = p.pdl;
  return launch_kernel(w8_gemm_sm90_kernel<C>, how, stream, p, row_scales, maps, schedule);
}

}  // namespace

int w8_gemm_sm90(const W8Gemm& p, const void* x, const float* row_scales, Stream stream) {
  if (!has_w8_gemm_sm90(p)) return kNoKernel;
  const W8GemmPlan plan = w8_gemm_plan(p);
  const auto with = [&]<class C>(C) { return launch<C>(p, x, row_scales, plan, stream); };
  if (p.weight_dtype == DType::kInt8) {
    switch (plan.tile_m) {
      case 16:
        return with(Config<Int8Weight, Rows::kScaled, 16, 64>{});
      case 32:
        return with(Config<Int8Weight, Rows::kScaled, 32, 64>{});
      case 64:
        return with(Config<Int8Weight, Rows::kScaled, 64, 64>{});
      case 128:
        return with(Config<Int8Weight, Rows::kScaled, 128, 128>{});
      case 192:
        return with(Config<Int8Weight, Rows::kScaled, 192, 128>{});
      default:
        return with(Config<Int8Weight, Rows::kScaled, 256, 128>{});
    }
  }
  const auto fp8 = [&]<Rows X>() {
    switch (plan.tile_m) {
      case 16:
        return with(Config<E4m3Weight, X, 16, 64>{});
      case 32:
        return with(Config<E4m3Weight, X, 32, 64>{});
      case 64:
        return with(Config<E4m3Weight, X, 64, 64>{});
      default:
        return with(Config<E4m3Weight, X, 128, 128>{});
    }
  };
  return p.scales_row == 0 ? fp8.operator()<Rows::kScaled>() : fp8.operator()<Rows::kParts>();
}

int w8_split_gemm_sm90(const W8Gemm& p, const SplitRows& x, Stream stream) {
  if (!has_w8_split_gemm_sm90(p)) return kNoKernel;
  const W8GemmPlan plan = w8_gemm_plan(p);
  return p.weight_dtype == DType::kInt8
             ? launch<Config<Int8Weight, Rows::kSplit, 16, 64>>(p, x.values, x.scales, plan, stream)
             : launch<Config<E4m3Weight, Rows::kSplit, 24, 64>>(p, x.values, x.scales, plan, stream);
}

}  // namespace untorch::kernels::cuda
