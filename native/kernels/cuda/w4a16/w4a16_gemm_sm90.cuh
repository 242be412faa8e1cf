// Products of any number of rows with packed weights of four bits, by the tensor instructions of sm_90.
//
// Layout: a block makes tiles of 256 columns (192 for 128 rows, 128 for more) and Rows rows (8 to 256) from blocks of
// 128 k's in shared memory: x's rows in two halves of 64 k's, 128 bytes each, permuted as the warpgroup instruction's
// 128-byte swizzle wants them; the weights as they are, 512 bytes for every 8 columns; the scales, as `Format` has
// them. One thread has boxes of all of it copied, up to five stages ahead. Sixteen, twelve or eight warps multiply.
// Wide tiles save bytes from the second-level cache, where x costs four times what weights do.
//
// Of the warpgroups that multiply each has 64 columns, the rows of the instruction's first operand: a warp's 16 columns
// and 16 k's lie in registers as in mma.m16n8k16, so weights are unpacked there. x is the second operand, from shared
// memory. Unlike mma.sync, which takes all of a scheduler's time, these run beside the unpacking of other warps.
//
// Every multiprocessor has one block, and all have equal shares of the work: stream_k.cuh. Some have none where the
// others then have whole tiles, if that is faster; which tiles are, tile_heuristic.h says.
//
// Bytes: of shared memory a stage, 256 Rows, 64 a column and its scales (int4 4 a group; NVFP4 16, of which it uses 8);
// from the second-level cache likewise; 0.53 (group 128) or 0.56 a weight from memory. Operations: 2·m·n·k. For a word
// of 8 weights a scheduler issues 13 instructions to unpack it (NVFP4 15), and Rows / 2 cycles pass for its product, at
// least 13, at the same time. Share of what an H200's memory or tensor cores allow, 8192 × 28672 with 8, 32, 128, 1024
// rows: int4 0.69, 0.57, 0.80, 0.93; NVFP4 0.60, 0.54, 0.82, 0.98.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/tile_heuristic.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"
#include "kernels/cuda/w4a16/stream_k.cuh"
#include "kernels/cuda/sm90/mbarrier.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

// Threads of a block that do not multiply. One has boxes copied, one of another warp exchanges sums with other thread
// blocks; the others are there because registers are given and taken by warpgroups. Blocks of 640 threads have 96
// registers for each, which sums for 128 rows do not fit: those have 512 threads, and 384 for more.
constexpr int kCopy = 128;
// Who says that a stage was read: a lane for its warp. compute-sanitizer's racecheck does not always follow that back
// to the other lanes; in a library that is built for it (UNTORCH_RACECHECK) all of them say it.
#ifdef UNTORCH_RACECHECK
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif

template <class Format, int Rows>
struct Stage {
  static constexpr int kCols = sm90_tile_n(Rows), kMultiply = 2 * kCols, kThreads = kMultiply + kCopy;
  static constexpr int kSums = Rows / 2;  // of a thread
  static constexpr int kHalf = Rows * 128, kX = 2 * kHalf, kWeights = kCols / 8 * 512;
  static constexpr int kUsed = kX + kWeights + kCols * Format::kColumnBytes;
  static constexpr int kBytes = (kUsed + 1023) / 1024 * 1024;  // as the swizzle wants it
  static constexpr int kMost = (kSm90SharedBytes - 2048) / kBytes;
  // With more of them under way, some thread blocks wait longer for their first one.
  static constexpr int kCount = kMost < 5 ? kMost : 5;
  static constexpr int kShared = kCount * kBytes + (2 * kCount + 2) * 8 + 1024;  // to begin at a multiple of it

  // Registers that each thread of those that multiply takes, and that those who copy keep. What the block was started
  // with is all there is: with more they would wait for ever.
  static constexpr int kTaken = Rows > 128 ? 224 : Rows == 128 ? 152 : 104;
  static constexpr int kKept = Rows >= 128 ? 56 : 64;
  static_assert(kMultiply * kTaken + kCopy * kKept <= 65536 / kThreads / 8 * 8 * kThreads);
};

// The value, computed once and not wherever it is used.
__device__ __forceinline__ std::uint32_t once(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

// The same for the whole warp, as the compiler then knows: what follows from it is computed once for all lanes.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }
__device__ __forceinline__ Segment uniform(const Segment& part) {
  return {uniform(part.tile), uniform(part.from), uniform(part.to)};
}

// Registers of each thread from here on, of all in the warpgroup.
template <int Count>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}

// The transpose of an 8 x 8 matrix of 2-byte elements, of which lane (g, t) has row g, columns 2 t and 2 t + 1.
__device__ __forceinline__ std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

template <class T>
__device__ __forceinline__ std::uint32_t pair_of(float x, float y) {
  struct alignas(4) Two {
    T x, y;
  };
  const Two two{narrow<T>(x), narrow<T>(y)};
  std::uint32_t out;
  memcpy(&out, &two, 4);
  return out;
}

// What a launch copies by boxes: of x Rows rows and 64 k's, or as many as the last tiles have, because rows that are
// not there would take longer than others; of weights and scales those of a stage.
struct Boxes {
  TensorMap x, last_x, weights, scales;
};

// Where a stage's barriers are, and those of exchange_partials.
template <class Format, int Rows>
struct Barriers {
  using S = Stage<Format, Rows>;
  std::uint32_t base;

  __device__ __forceinline__ std::uint32_t full(int stage) const { return base + S::kCount * S::kBytes + stage * 8; }
  __device__ __forceinline__ std::uint32_t empty(int stage) const { return full(S::kCount + stage); }
  __device__ __forceinline__ std::uint32_t left() const { return full(2 * S::kCount); }
  __device__ __forceinline__ std::uint32_t ready() const { return full(2 * S::kCount + 1); }

  __device__ __forceinline__ void make(int thread) const {
    if (thread < S::kCount) {
      make_barrier(full(thread), 1);
      make_barrier(empty(thread), S::kMultiply / 32 * kArriving);
    } else if (thread == S::kCount) {
      make_barrier(left(), S::kMultiply / 32);
      make_barrier(ready(), 1);
    }
    publish_barriers();
  }
};

// By one thread: has boxes copied to all stages, in turn.
template <class Format, int Rows>
__device__ __forceinline__ void copy_stages(const typename Format::Gemm& p, const Boxes& boxes, const Work& work,
                                            Barriers<Format, Rows> barriers) {
  using S = Stage<Format, Rows>;
  prefetch_map(boxes.x), prefetch_map(boxes.last_x), prefetch_map(boxes.weights), prefetch_map(boxes.scales);
  wait_for_kernels_before();
  const int begin = work.begin_of(static_cast<int>(blockIdx.x));
  // Read once, or again for other rows.
  const std::uint64_t policy = p.m <= Rows ? keep_shortly() : keep_as_usual();
  int stage = 0, parity = 1;  // all are empty
  for (int stop = work.begin_of(static_cast<int>(blockIdx.x) + 1); stop > begin;) {
    const Segment part = segment_before(work, begin, stop);
    stop -= part.to - part.from;
    const int top = part.tile / work.column_tiles * Rows, first = part.tile % work.column_tiles * S::kCols;
    const bool last = top + Rows > p.m;
    const TensorMap& x = last ? boxes.last_x : boxes.x;
    const int rows = last ? static_cast<int>(p.m) - top : Rows;
    const int bytes = rows * 256 + S::kWeights + S::kCols * Format::kColumnBytes;
    for (int block = part.from; block < part.to; ++block) {
      const std::uint32_t full = barriers.full(stage), to = barriers.base + stage * S::kBytes;
      const int k0 = block * kW4A16BlockK;
      wait_at(barriers.empty(stage), parity);
      expect_bytes(full, bytes);
      copy_box(to, x, k0, top, full);
      copy_box(to + S::kHalf, x, k0 + 64, top, full);
      copy_box(to + S::kX, boxes.weights, k0, first / 8, full, policy);
      Format::template copy_scales<S::kCols>(p, boxes.scales, to + S::kX + S::kWeights, first, k0, full, policy);
      stage = stage == S::kCount - 1 ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
  }
}

// The sums of rows 8 r and following in acc[4 r] and the next three: of column g with rows 2 t and the next, then those
// of column 8 + g.
template <class Format, class T, int Rows>
__device__ __forceinline__ void store_tile(const typename Format::Gemm& p, int top, int first,
                                           const float (&acc)[Stage<Format, Rows>::kSums]) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const int column = first + (warp * 2 + tile) * 8;
    const float* const sums = acc + tile * 2;
    if (column >= p.n) return;  // the same for the whole warp
    const float bias = p.bias == nullptr ? 0.0f : widen(static_cast<const T*>(p.bias)[column + g]);
    float factor = 1.0f;
    if constexpr (Format::kScalesSums) factor = Format::template factor<T>(p, std::int64_t{column + g});
    const auto finished = [&](float sum) { return Format::kScalesSums ? fmaf(sum, factor, bias) : sum + bias; };
#pragma unroll
    for (int i = 0; i < Rows / 8; ++i) {
      const std::uint32_t pair = transposed(pair_of<T>(finished(sums[4 * i]), finished(sums[4 * i + 1])));
      const int row = top + i * 8 + g;
      if (row < p.m) {
        *reinterpret_cast<std::uint32_t*>(static_cast<T*>(p.out) + std::int64_t{row} * p.n + column + 2 * t) = pair;
      }
    }
  }
}

// acc += a stage's products, by the four warps of a warpgroup together: 16 columns each, all rows. x: operand_at's;
// tiles: this lane's first words of the warp's two tiles of weights; low, high: where the scales of its two columns
// are.
template <class Format, class T, int Rows>
__device__ __forceinline__ void multiply_stage(const typename Format::Gemm& p, std::uint32_t x, SharedWords tiles,
                                               SharedWords scales, int low, int high, int block,
                                               float (&acc)[Stage<Format, Rows>::kSums]) {
  using S = Stage<Format, Rows>;
  using Column = typename Format::template Column<T, S::kCols, SharedWords>;
  Column low_column(p, scales, low, block), high_column(p, scales, high, block);
  const uint4 low_words = tiles.four(0), high_words = tiles.four(128);
  std::uint32_t operands[4][2][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
    std::uint32_t low_pairs[4], high_pairs[4];
    low_column.prepare(j), high_column.prepare(j);
    low_column.unpack_word(j, word(low_words), low_pairs);
    high_column.unpack_word(j, word(high_words), high_pairs);
    operands_of_words(low_pairs, high_pairs, operands[j]);
  }
  // All of a stage at once: the four warps, which are not equally far, wait for each other before each fence.
  warpgroup_fence();
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      warpgroup_mma<T>(acc, operands[j][half], x + (j / 2 * S::kHalf + (2 * j + half) % 4 * 32) / 16);
    }
  }
  warpgroup_commit();
  // ptxas keeps instructions of one turn of a loop out of the next one by making all of them wait for each other.
  // Meanwhile other warpgroups multiply.
  warpgroup_wait<0>();
}

template <class Format, class T, int Rows>
__device__ __forceinline__ void multiply_stages(const typename Format::Gemm& p, const Work& work, int warp,
                                                Barriers<Format, Rows> barriers) {
  using S = Stage<Format, Rows>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int own = warp * 1024 + lane * 16;  // bytes of weights before this lane's
  const int column = warp * 16 + lane / 4;
  const int low = Format::template place_of<S::kCols>(p, column);
  const int high = Format::template place_of<S::kCols>(p, column + 8);
  const int begin = uniform(work.begin_of(static_cast<int>(blockIdx.x)));
  int stage = 0, parity = 0;
  for (int stop = uniform(work.begin_of(static_cast<int>(blockIdx.x) + 1)); stop > begin;) {
    const Segment part = uniform(segment_before(work, begin, stop));
    stop -= part.to - part.from;
    float acc[S::kSums] = {};
    for (int block = part.from; block < part.to; ++block) {
      const std::uint32_t at = barriers.base + stage * S::kBytes;
      wait_at(barriers.full(stage), parity);
      multiply_stage<Format, T, Rows>(p, uniform(operand_at(at)), SharedWords{at + S::kX + own},
                                      SharedWords{at + S::kX + S::kWeights}, low, high, block, acc);
      __syncwarp();  // all lanes have read the stage
      if (lane < kArriving) arrive_at(barriers.empty(stage));
      stage = stage == S::kCount - 1 ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
    if (part.to < work.depth) {
      leave_partial<S::kMultiply>(work, acc, barriers.left());
    } else {
      if (part.from > 0) add_partials<S::kMultiply>(work, part.tile * work.depth, acc, barriers.ready());
      store_tile<Format, T, Rows>(p, part.tile / work.column_tiles * Rows, part.tile % work.column_tiles * S::kCols,
                                  acc);
    }
  }
}

template <class Format, class T, int Rows>
__global__ void __launch_bounds__((Stage<Format, Rows>::kThreads), 1)
    stream_packed(typename Format::Gemm p, const __grid_constant__ Boxes boxes, Work work) {
  using S = Stage<Format, Rows>;
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_begin();
  const Barriers<Format, Rows> barriers{once((shared_address(memory) + 1023) / 1024 * 1024)};
  if (threadIdx.x <= S::kCount) barriers.make(static_cast<int>(threadIdx.x));
  __syncthreads();
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp < S::kMultiply / 32) {
    take_registers<S::kTaken>();
    multiply_stages<Format, T, Rows>(p, work, warp, barriers);
    return;
  }
  give_registers<S::kKept>();
  if (threadIdx.x == S::kMultiply) copy_stages(p, boxes, work, barriers);
  if (threadIdx.x == S::kMultiply + 32) {
    wait_for_kernels_before();
    exchange_partials(work, barriers.left(), barriers.ready());
  }
}

template <class Format, class T, int Rows>
int launch_gemm_sm90(const typename Format::Gemm& p, const StreamKPlan& plan, Stream stream) {
  using S = Stage<Format, Rows>;
  Work work;
  work.column_tiles = plan.column_tiles, work.depth = plan.depth;
  work.share = static_cast<int>(plan.work() / plan.blocks), work.longer = static_cast<int>(plan.work() % plan.blocks);
  work.flags = reinterpret_cast<unsigned long long*>(p.workspace);
  work.partials = p.workspace + 2 * ((p.num_sms + 15) / 16 * 16);
  work.token = fresh_token();
  static_assert(S::kShared <= kSm90SharedBytes);
  Boxes boxes{};
  const auto last = static_cast<int>(p.m - std::int64_t{plan.row_tiles - 1} * Rows);
  MatrixOfBoxes x{.from = p.x,
                  .element_bytes = 2,
                  .rows = p.m,
                  .columns = p.x_width,
                  .row_bytes = p.x_row * 2,
                  .box_rows = last,
                  .box_columns = 64,
                  .swizzle = true};
  if (const int code = make_tensor_map(x, boxes.last_x)) return code;
  boxes.x = boxes.last_x, x.box_rows = Rows;
  if (plan.row_tiles > 1 && last != Rows) {
    if (const int code = make_tensor_map(x, boxes.x)) return code;
  }
  if (const int code = make_tensor_map({.from = p.weight,
                                        .element_bytes = 4,
                                        .rows = p.n / 8,
                                        .columns = p.k,
                                        .row_bytes = p.k * 4,
                                        .box_rows = S::kCols / 8,
                                        .box_columns = 128},
                                       boxes.weights)) {
    return code;
  }
  if (const int code = make_tensor_map(Format::scale_boxes(p, S::kCols), boxes.scales)) return code;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(plan.blocks));
  how.threads = S::kThreads, how.shared_bytes = S::kShared;
  how.early = p.early;
  return launch_kernel(stream_packed<Format, T, Rows>, how, stream, p, boxes, work);
}

template <class Format, class T>
int gemm_sm90_for_plan(const typename Format::Gemm& p, const StreamKPlan& plan, Stream stream) {
  switch (plan.rows) {
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

// Rows of the launch that begins with row `first`.
inline std::int64_t sm90_launch_m(const W4A16Gemm& p, std::int64_t first) {
  return std::min<std::int64_t>(p.m - first, kSm90MaxM);
}

// All launches have the same: flags, then sums.
inline std::size_t gemm_sm90_workspace(const W4A16Gemm& p) {
  const std::int64_t first = choose_stream_k_plan(p, sm90_launch_m(p, 0)).partials();
  const std::int64_t last =
      choose_stream_k_plan(p, sm90_launch_m(p, (p.m - 1) / kSm90MaxM * kSm90MaxM)).partials();
  return static_cast<std::size_t>((p.num_sms + 15) / 16 * 16 * 8 + std::max(first, last) * 4);
}

template <class Format>
int gemm_sm90(const typename Format::Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8 || !p.has_wgmma || p.n > (1 << 24) || p.k > (1 << 24)) return kNoKernel;
  if (p.dtype != DType::kFloat16 && p.dtype != DType::kBFloat16) return kNoKernel;
  for (std::int64_t first = 0; first < p.m; first += kSm90MaxM) {
    typename Format::Gemm part = p;
    part.m = sm90_launch_m(p, first);
    part.x = static_cast<const char*>(p.x) + first * p.x_row * 2;
    part.out = static_cast<char*>(p.out) + first * p.n * 2;
    const StreamKPlan plan = choose_stream_k_plan(part, part.m);
    if (plan.work() > (1 << 30)) return kNoKernel;
    const int code = p.dtype == DType::kFloat16 ? gemm_sm90_for_plan<Format, __half>(part, plan, stream)
                                                 : gemm_sm90_for_plan<Format, __nv_bfloat16>(part, plan, stream);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace
}  // namespace untorch::kernels::cuda
