// W4A16 GEMM for any M on sm_90a: a warp-specialized persistent kernel, WGMMA and TMA, with a stream-K schedule.
//
// One CTA an SM; tiles of TileM × TileN, TileM 8 to 256, TileN 256 (192 for TileM 128, 128 above): tile_heuristic.h
// chooses the tile and the number of CTAs, stream_k.cuh schedules them and does the fix-up. Large TileN saves bytes
// from L2, where x costs four times what weights do.
//
//   consumers    8, 12 or 16 warps, warpgroups of 64 columns: wait for full[s], dequantize a k block in registers,
//                WGMMA, arrive at empty[s]
//   producer     1 thread of 4 more warps: waits for empty[s], issues the TMA loads of stage s, which complete full[s]
//   fix-up       1 thread of another of the 4: flags of partial sums in global memory
//   registers    setmaxnreg: 104 to 224 a consumer thread, 56 or 64 for the others
//
//   a stage in shared memory, one k block (128 k), up to 5 stages
//     x        [2][TileM][64] 16-bit    two halves of 64 k, rows of 128 bytes, 128-byte swizzle
//     weight   [TileN / 8][128] words   as packed, 512 bytes for 8 columns
//     scales   as `Format` has them     int4_scales.cuh, nvfp4_scales.cuh
//
// The weight is WGMMA's A operand (M of the instruction: 64 columns of the weight), from registers: its fragments are
// those of mma.m16n8k16, in which the weight is packed, so dequantizing needs no shuffle. x is the B operand, from
// shared memory. mma.sync keeps a scheduler from issuing while it runs; WGMMA runs beside other warps' dequantizing.
//
// Bytes: of shared memory, and from L2, 256 · TileM + 64 · TileN and the scales a stage (int4 4 a group; NVFP4 16, of
// which 8 are used, a column); from memory 0.53 (int4, group 128) or 0.56 (NVFP4) a weight. Operations: 2·M·N·K. For a
// word of 8 weights a scheduler issues 13 instructions to dequantize (NVFP4 15), beside TileM / 2 cycles of WGMMA, 13
// at least. Share of the roofline (memory or tensor cores) of an H200, 8192 × 28672, M = 8, 32, 128, 1024: int4 0.69,
// 0.57, 0.80, 0.93; NVFP4 0.60, 0.54, 0.82, 0.98.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/sm90/warps.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/stream_k.cuh"
#include "kernels/cuda/w4a16/tile_heuristic.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

// The non-consumer warpgroup: a producer thread, the fix-up thread in another warp; the rest is there because
// setmaxnreg acts on whole warpgroups. A CTA of 640 threads starts with 96 registers a thread, too few for the
// accumulators of TileM 128: there it has 512 threads, and 384 above.
constexpr int kProducerThreads = 128;
// Arrivals of a consumer warp at `empty`: one lane's, for the warp. compute-sanitizer's racecheck does not always
// follow that back to the other lanes; in a library that is built for it (UNTORCH_RACECHECK) every lane arrives.
#ifdef UNTORCH_RACECHECK
constexpr int kArrivalsPerWarp = 32;
#else
constexpr int kArrivalsPerWarp = 1;
#endif

template <class Format, int TileM>
struct Mainloop {
  static constexpr int kTileN = sm90_tile_n(TileM), kConsumerThreads = 2 * kTileN,
                       kThreads = kConsumerThreads + kProducerThreads;
  static constexpr int kAccumulators = TileM / 2;  // of a thread
  static constexpr int kXHalfBytes = TileM * 128, kXBytes = 2 * kXHalfBytes, kWeightBytes = kTileN / 8 * 512;
  static constexpr int kUsedBytes = kXBytes + kWeightBytes + kTileN * Format::kScaleBytesPerColumn;
  static constexpr int kStageBytes = (kUsedBytes + 1023) / 1024 * 1024;  // the swizzle's alignment
  static constexpr int kMaxStages = (kSm90SharedBytes - 2048) / kStageBytes;
  // With more stages in flight, some CTAs wait longer for their first one.
  static constexpr int kStages = kMaxStages < 5 ? kMaxStages : 5;
  static constexpr int kSharedBytes = kStages * kStageBytes + (2 * kStages + 2) * 8 + 1024;  // 1024: to align the start

  // Of a thread, after setmaxnreg. The CTA's registers at launch are all there are: setmaxnreg.inc would wait for ever
  // for more.
  static constexpr int kConsumerRegisters = TileM > 128 ? 224 : TileM == 128 ? 152 : 104;
  static constexpr int kProducerRegisters = TileM >= 128 ? 56 : 64;
  static_assert(kConsumerThreads * kConsumerRegisters + kProducerThreads * kProducerRegisters <=
                65536 / kThreads / 8 * 8 * kThreads);
};

// Hides the value's origin from the compiler, which would compute it anew at every use.
__device__ __forceinline__ std::uint32_t opaque(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

using ::untorch::kernels::cuda::warp_uniform;
__device__ __forceinline__ WorkTile warp_uniform(const WorkTile& work) {
  return {warp_uniform(work.tile), warp_uniform(work.k_begin), warp_uniform(work.k_end)};
}

// Transposes an 8 × 8 matrix of 2-byte elements; lane (g, t) has row g, columns 2t and 2t + 1.
__device__ __forceinline__ std::uint32_t movmatrix_transpose(std::uint32_t pair) {
  std::uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

template <class T>
__device__ __forceinline__ std::uint32_t pack_pair(float x, float y) {
  struct alignas(4) Two {
    T x, y;
  };
  const Two two{narrow<T>(x), narrow<T>(y)};
  std::uint32_t out;
  memcpy(&out, &two, 4);
  return out;
}

// x: loads of TileM rows and 64 k; x_residue: of the rows that the last tile in M has, because TMA fills out-of-bounds
// rows more slowly than it copies others. weight, scales: loads of a stage.
struct TensorMaps {
  TensorMap x, x_residue, weight, scales;
};

// Shared-memory addresses of the mbarriers: full and empty of each stage, and the two of exchange_fixup_flags.
template <class Format, int TileM>
struct MBarriers {
  using L = Mainloop<Format, TileM>;
  std::uint32_t base;  // of stage 0

  __device__ __forceinline__ std::uint32_t full(int stage) const {
    return base + L::kStages * L::kStageBytes + stage * 8;
  }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(L::kStages + stage); }
  __device__ __forceinline__ std::uint32_t partial_stored() const { return full(2 * L::kStages); }
  __device__ __forceinline__ std::uint32_t partials_ready() const { return full(2 * L::kStages + 1); }

  __device__ __forceinline__ void init(int thread) const {
    if (thread < L::kStages) {
      mbarrier_init(full(thread), 1);
      mbarrier_init(empty(thread), L::kConsumerThreads / 32 * kArrivalsPerWarp);
    } else if (thread == L::kStages) {
      mbarrier_init(partial_stored(), L::kConsumerThreads / 32);
      mbarrier_init(partials_ready(), 1);
    }
    fence_mbarrier_init();
  }
};

// The producer, one thread: issues the TMA loads of all stages.
template <class Format, int TileM>
__device__ __forceinline__ void produce_stages(const typename Format::Gemm& p, const TensorMaps& maps,
                                               const TileScheduler& scheduler, MBarriers<Format, TileM> barriers) {
  using L = Mainloop<Format, TileM>;
  prefetch_tensor_map(maps.x), prefetch_tensor_map(maps.x_residue), prefetch_tensor_map(maps.weight),
      prefetch_tensor_map(maps.scales);
  griddepcontrol_wait();
  const int begin = scheduler.range_begin(static_cast<int>(blockIdx.x));
  // Weights are read once, or again for each tile in M.
  const std::uint64_t policy = p.m <= TileM ? l2_evict_first() : l2_evict_normal();
  int stage = 0, parity = 1;  // all stages are empty
  for (int end = scheduler.range_begin(static_cast<int>(blockIdx.x) + 1); end > begin;) {
    const WorkTile work = last_work_tile(scheduler, begin, end);
    end -= work.k_end - work.k_begin;
    const int m0 = work.tile / scheduler.tiles_n * TileM, n0 = work.tile % scheduler.tiles_n * L::kTileN;
    const bool residue = m0 + TileM > p.m;
    const TensorMap& x = residue ? maps.x_residue : maps.x;
    const int rows = residue ? static_cast<int>(p.m) - m0 : TileM;
    const int bytes = rows * 256 + L::kWeightBytes + L::kTileN * Format::kScaleBytesPerColumn;
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      const std::uint32_t full = barriers.full(stage), to = barriers.base + stage * L::kStageBytes;
      const int k0 = k_block * kW4A16BlockK;
      mbarrier_wait(barriers.empty(stage), parity);
      mbarrier_arrive_expect_tx(full, bytes);
      tma_load_2d(to, x, k0, m0, full);
      tma_load_2d(to + L::kXHalfBytes, x, k0 + 64, m0, full);
      tma_load_2d(to + L::kXBytes, maps.weight, k0, n0 / 8, full, policy);
      Format::template load_scales<L::kTileN>(p, maps.scales, to + L::kXBytes + L::kWeightBytes, n0, k0, full, policy);
      stage = stage == L::kStages - 1 ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
  }
}

// Epilogue: global scale, bias, rounding, a transpose, and stores of 4 bytes. Accumulators 4r to 4r + 3 of a thread are
// of rows 8r + 2t and the next: two of column g, two of column 8 + g.
template <class Format, class T, int TileM>
__device__ __forceinline__ void epilogue(const typename Format::Gemm& p, int m0, int n0,
                                         const float (&acc)[Mainloop<Format, TileM>::kAccumulators]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int column = n0 + (warp * 2 + tile) * 8;
    const float* const sums = acc + tile * 2;
    if (column >= p.n) return;  // warp-uniform
    const float bias = p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[column + g]);
    float scale = 1.0f;
    if constexpr (Format::kHasGlobalScale) scale = Format::template global_scale<T>(p, std::int64_t{column + g});
    const auto finished = [&](float sum) { return Format::kHasGlobalScale ? fmaf(sum, scale, bias) : sum + bias; };
#pragma unroll
    for (int i = 0; i < TileM / 8; ++i) {
      const std::uint32_t pair = movmatrix_transpose(pack_pair<T>(finished(sums[4 * i]), finished(sums[4 * i + 1])));
      const int row = m0 + i * 8 + g;
      if (row < p.m) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.out) + std::int64_t{row} * p.n + column + 2 * t) = pair;
      }
    }
  }
}

// One k block, by a warpgroup: acc += weight · xᵀ, 16 columns a warp, all rows. x: smem_descriptor's; weight: this
// lane's first words of the warp's two 8-column tiles; low, high: where the scales of its two columns are.
template <class Format, class T, int TileM>
__device__ __forceinline__ void mma_k_block(const typename Format::Gemm& p, std::uint32_t x, SharedWords weight,
                                            SharedWords scales, int low, int high, int k_block,
                                            float (&acc)[Mainloop<Format, TileM>::kAccumulators]) {
  using L = Mainloop<Format, TileM>;
  using ColumnScales = typename Format::template ColumnScales<T, L::kTileN, SharedWords>;
  ColumnScales low_scales(p, scales, low, k_block), high_scales(p, scales, high, k_block);
  const uint4 low_words = weight.four(0), high_words = weight.four(128);
  std::uint32_t fragments[4][2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
    std::uint32_t low_pairs[4], high_pairs[4];
    low_scales.prepare(j), high_scales.prepare(j);
    low_scales.dequantize_word(j, word(low_words), low_pairs);
    high_scales.dequantize_word(j, word(high_words), high_pairs);
    pack_a_fragments(low_pairs, high_pairs, fragments[j]);
  }
  // All WGMMAs of a stage at once: the warpgroup's four warps, which are not equally far, wait for each other before
  // each fence.
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      wgmma<T>(acc, fragments[j][half], x + (j / 2 * L::kXHalfBytes + (2 * j + half) % 4 * 32) / 16);
    }
  }
  wgmma_commit_group();
  // ptxas serialises WGMMAs that are in flight across iterations of a loop, so none is. Other warpgroups issue theirs
  // meanwhile.
  wgmma_wait_group<0>();
}

// A consumer warp: the mainloop over the CTA's work tiles, then fix-up and epilogue of each.
template <class Format, class T, int TileM>
__device__ __forceinline__ void consume_stages(const typename Format::Gemm& p, const TileScheduler& scheduler, int warp,
                                               MBarriers<Format, TileM> barriers) {
  using L = Mainloop<Format, TileM>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int weight_offset = warp * 1024 + lane * 16;  // bytes
  const int column = warp * 16 + lane / 4;
  const int low = Format::template scale_index<L::kTileN>(p, column);
  const int high = Format::template scale_index<L::kTileN>(p, column + 8);
  const int begin = warp_uniform(scheduler.range_begin(static_cast<int>(blockIdx.x)));
  int stage = 0, parity = 0;
  for (int end = warp_uniform(scheduler.range_begin(static_cast<int>(blockIdx.x) + 1)); end > begin;) {
    const WorkTile work = warp_uniform(last_work_tile(scheduler, begin, end));
    end -= work.k_end - work.k_begin;
    float acc[L::kAccumulators] = {};
    for (int k_block = work.k_begin; k_block < work.k_end; ++k_block) {
      const std::uint32_t at = barriers.base + stage * L::kStageBytes;
      mbarrier_wait(barriers.full(stage), parity);
      mma_k_block<Format, T, TileM>(p, warp_uniform(smem_descriptor(at)), SharedWords{at + L::kXBytes + weight_offset},
                                    SharedWords{at + L::kXBytes + L::kWeightBytes}, low, high, k_block, acc);
      __syncwarp();  // all lanes have read the stage
      if (lane < kArrivalsPerWarp) mbarrier_arrive(barriers.empty(stage));
      stage = stage == L::kStages - 1 ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
    if (work.k_end < scheduler.k_blocks) {
      store_partial<L::kConsumerThreads>(scheduler, acc, barriers.partial_stored());
    } else {
      if (work.k_begin > 0) {
        reduce_partials<L::kConsumerThreads>(scheduler, work.tile * scheduler.k_blocks, acc, barriers.partials_ready());
      }
      epilogue<Format, T, TileM>(p, work.tile / scheduler.tiles_n * TileM, work.tile % scheduler.tiles_n * L::kTileN,
                                 acc);
    }
  }
}

template <class Format, class T, int TileM>
__global__ void __launch_bounds__((Mainloop<Format, TileM>::kThreads), 1)
    w4a16_gemm_sm90_kernel(typename Format::Gemm p, const __grid_constant__ TensorMaps maps, TileScheduler scheduler) {
  using L = Mainloop<Format, TileM>;
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  const MBarriers<Format, TileM> barriers{opaque((shared_address(memory) + 1023) / 1024 * 1024)};
  if (threadIdx.x <= L::kStages) barriers.init(static_cast<int>(threadIdx.x));
  __syncthreads();
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp < L::kConsumerThreads / 32) {
    setmaxnreg_inc<L::kConsumerRegisters>();
    consume_stages<Format, T, TileM>(p, scheduler, warp, barriers);
    return;
  }
  setmaxnreg_dec<L::kProducerRegisters>();
  if (threadIdx.x == L::kConsumerThreads) produce_stages(p, maps, scheduler, barriers);
  if (threadIdx.x == L::kConsumerThreads + 32) {
    griddepcontrol_wait();
    exchange_fixup_flags(scheduler, barriers.partial_stored(), barriers.partials_ready());
  }
}

template <class Format, class T, int TileM>
int launch_gemm_sm90(const typename Format::Gemm& p, const StreamKPlan& plan, Stream stream) {
  using L = Mainloop<Format, TileM>;
  static_assert(L::kSharedBytes <= kSm90SharedBytes);
  TileScheduler scheduler;
  scheduler.tiles_n = plan.tiles_n, scheduler.k_blocks = plan.k_blocks;
  scheduler.k_blocks_per_cta = static_cast<int>(plan.total_k_blocks() / plan.ctas);
  scheduler.remainder = static_cast<int>(plan.total_k_blocks() % plan.ctas);
  scheduler.flags = reinterpret_cast<unsigned long long*>(p.workspace);
  scheduler.partials = p.workspace + 2 * ((p.num_sms + 15) / 16 * 16);
  scheduler.launch_id = unique_launch_id();
  TensorMaps maps{};
  const auto residue_m = static_cast<int>(p.m - std::int64_t{plan.tiles_m - 1} * TileM);
  TensorMapSpec x{.base = p.x,
                  .element_bytes = 2,
                  .rows = p.m,
                  .columns = p.x_width,
                  .row_bytes = p.x_stride * 2,
                  .box_rows = residue_m,
                  .box_columns = 64,
                  .swizzle = true};
  if (const int code = encode_tensor_map(x, maps.x_residue)) return code;
  maps.x = maps.x_residue, x.box_rows = TileM;
  if (plan.tiles_m > 1 && residue_m != TileM) {
    if (const int code = encode_tensor_map(x, maps.x)) return code;
  }
  if (const int code = encode_tensor_map({.base = p.weight,
                                          .element_bytes = 4,
                                          .rows = p.n / 8,
                                          .columns = p.k,
                                          .row_bytes = p.k * 4,
                                          .box_rows = L::kTileN / 8,
                                          .box_columns = 128},
                                         maps.weight)) {
    return code;
  }
  if (const int code = encode_tensor_map(Format::scale_map_spec(p, L::kTileN), maps.scales)) return code;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(plan.ctas));
  how.threads = L::kThreads, how.shared_bytes = L::kSharedBytes;
  how.pdl = p.pdl;
  return launch_kernel(w4a16_gemm_sm90_kernel<Format, T, TileM>, how, stream, p, maps, scheduler);
}

template <class Format, class T>
int gemm_sm90_for_plan(const typename Format::Gemm& p, const StreamKPlan& plan, Stream stream) {
  switch (plan.tile_m) {
    case 8:
      return launch_gemm_sm90<Format, T, 8>(p, plan, stream);
    case 16:
      return launch_gemm_sm90<Format, T, 16>(p, plan, stream);
    case 32:
      return launch_gemm_sm90<Format, T, 32>(p, plan, stream);
    case 64:
      return launch_gemm_sm90<Format, T, 64>(p, plan, stream);
    case 128:
      return launch_gemm_sm90<Format, T, 128>(p, plan, stream);
    case 192:
      return launch_gemm_sm90<Format, T, 192>(p, plan, stream);
    case 224:
      return launch_gemm_sm90<Format, T, 224>(p, plan, stream);
    default:
      return launch_gemm_sm90<Format, T, 256>(p, plan, stream);
  }
}

// M of the launch that begins with row m0.
inline std::int64_t sm90_launch_m(const W4A16Gemm& p, std::int64_t m0) {
  return std::min<std::int64_t>(p.m - m0, kSm90MaxM);
}

// Flags, then partial sums; all launches share them.
inline std::size_t gemm_sm90_workspace(const W4A16Gemm& p) {
  const std::int64_t first = choose_stream_k_plan(p, sm90_launch_m(p, 0)).partial_floats();
  const std::int64_t last =
      choose_stream_k_plan(p, sm90_launch_m(p, (p.m - 1) / kSm90MaxM * kSm90MaxM)).partial_floats();
  return static_cast<std::size_t>((p.num_sms + 15) / 16 * 16 * 8 + std::max(first, last) * 4);
}

template <class Format>
int gemm_sm90(const typename Format::Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8 || !p.has_wgmma || p.n > (1 << 24) || p.k > (1 << 24)) return kNoKernel;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return kNoKernel;
  for (std::int64_t m0 = 0; m0 < p.m; m0 += kSm90MaxM) {
    typename Format::Gemm part = p;
    part.m = sm90_launch_m(p, m0);
    part.x = static_cast<const char*>(p.x) + m0 * p.x_stride * 2;
    part.out = static_cast<char*>(p.out) + m0 * p.n * 2;
    const StreamKPlan plan = choose_stream_k_plan(part, part.m);
    if (plan.total_k_blocks() > (1 << 30)) return kNoKernel;
    const int code = p.dtype == DType::kFloat16 ? gemm_sm90_for_plan<Format, __half>(part, plan, stream)
                                                : gemm_sm90_for_plan<Format, __nv_bfloat16>(part, plan, stream);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace
}  // namespace untorch::kernels::cuda
