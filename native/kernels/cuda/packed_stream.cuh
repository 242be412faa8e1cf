// Products of up to a thousand rows with packed weights of four bits, by the tensor instructions of sm_90.
//
// Layout: a block makes tiles of 256 columns (192 for 128 rows, 128 for 256) and Rows rows (8 to 256) from blocks of
// 128 k's in shared memory: x's rows in two halves of 64 k's, 128 bytes each, permuted as the warpgroup instruction's
// 128-byte swizzle wants them; the weights as they are, 512 bytes for every 8 columns; the scales, as `Format` has
// them. Four warps copy, as many stages ahead as fit; the others multiply. Wide tiles save bytes from the second-level
// cache, where x costs four times what weights do.
//
// From 64 rows on sixteen, twelve or eight warps multiply, as warpgroups. Each of these has 64 columns, the rows of the
// instruction's first operand: a warp's 16 columns and 16 k's lie in registers as in mma.m16n8k16, so weights are
// unpacked there. x is the second operand, from shared memory. With fewer rows the instructions that surround such
// products cost more than they save: eight warps multiply by themselves, 32 columns each, as in packed_block.cuh.
//
// Every multiprocessor has one block, and all have equal shares of the work: packed_work.cuh. A few have none where the
// others then have whole tiles.
//
// Bytes: of shared memory a stage, 256 Rows, 64 a column and its scales (int4 16, or 4 where groups have 128 k's or
// more; NVFP4 8); from the second-level cache likewise; 0.53 (group 128) or 0.56 a weight from memory. Operations:
// 2·m·n·k. For a word of 8 weights a lane issues some 18 (int4 in groups of 128, 16 rows), 23 (32) or 27 (64 and more)
// instructions, for NVFP4 23, 26 or 31: that and memory are the bound up to about 90 rows, then the tensor cores.
#pragma once

#include "kernels/cuda/device_types.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/packed_block.cuh"
#include "kernels/cuda/packed_choice.h"
#include "kernels/cuda/packed_weights.cuh"
#include "kernels/cuda/packed_work.cuh"
#include "kernels/cuda/shared_barrier.cuh"
#include "kernels/cuda/tile_memory.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

// Blocks of 640 threads have 96 registers for each, which sums for 128 rows do not fit: those have 512 threads, and 384
// for 256 rows.
constexpr int kCopy = 128;
// Who says that a stage was read: a lane for its warp. compute-sanitizer's racecheck does not always follow that back to
// the other lanes; in a library that is built for it (UNTORCH_RACECHECK) all of them say it.
#ifdef UNTORCH_RACECHECK
constexpr int kArriving = 32;
#else
constexpr int kArriving = 1;
#endif
constexpr int columns_of(int rows) { return rows < 128 ? 256 : rows < 256 ? 192 : 128; }

template <class Format, int Rows>
struct Stage {
  // Up to so many rows warps multiply by themselves, two tiles of 16 columns each.
  static constexpr bool kByWarps = Rows <= 32;
  static constexpr int kPairs = kByWarps ? 2 : 1;
  static constexpr int kCols = columns_of(Rows), kMultiply = 2 * kCols / kPairs, kThreads = kMultiply + kCopy;
  static constexpr int kSums = kPairs * Rows / 2;  // of a thread
  static constexpr int kHalf = Rows * 128, kX = 2 * kHalf, kWeights = kCols / 8 * 512;
  static constexpr int kUsed = kX + kWeights + kCols * Format::kColumnBytes;
  static constexpr int kBytes = (kUsed + 1023) / 1024 * 1024;  // as the swizzle wants it
  static constexpr int kMost = (kPackedSharedOfStream - 2048) / kBytes, kCount = kMost < 10 ? kMost : 10;
  static constexpr int kBarriers = 2 * kCount * 8;
  static constexpr int kShared = kCount * kBytes + kBarriers + 1024;  // to begin at a multiple of it
  // Copies of so many stages are under way before the oldest is waited for: one is ready while one is multiplied.
  static constexpr int kAhead = kCount - 2;

  // Registers that each thread of those that multiply takes, and that those who copy keep. What the block was started
  // with is all there is: with more they would wait for ever.
  static constexpr int kTaken = kByWarps ? 200 : Rows == 256 ? 224 : Rows == 128 ? 152 : 104;
  static constexpr int kKept = kByWarps ? 96 : Rows >= 128 ? 56 : 64;
  static_assert(kMultiply * kTaken + kCopy * kKept <= 65536 / kThreads / 8 * 8 * kThreads);
};

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

template <class Format, int Rows>
__device__ __forceinline__ void copy_stages(const typename Format::Gemm& p, const Work& work, std::uint32_t base) {
  using S = Stage<Format, Rows>;
  constexpr int kCols = S::kCols;
  const std::uint32_t full = base + S::kCount * S::kBytes, empty = full + S::kCount * 8;
  const int thread = static_cast<int>(threadIdx.x) - S::kMultiply;
  const int row = thread / 16, chunk = thread % 16, weight_tile = thread / 32, lane = thread % 32;
  const int width = static_cast<int>(p.x_width) - chunk * 8;
  const std::uint32_t x_to = chunk / 8 * S::kHalf + row * 128 + (((chunk ^ row) & 7) << 4);
  const int begin = work.begin_of(static_cast<int>(blockIdx.x));
  const auto publish = [&](int which) {
    publish_shared();
    arrive_at(full + which * 8);
  };
  int issued = 0, stage = 0, ready = 0;
  for (int stop = work.begin_of(static_cast<int>(blockIdx.x) + 1); stop > begin;) {
    const Segment part = segment_before(work, begin, stop);
    stop -= part.to - part.from;
    const int top = part.tile / work.column_tiles * Rows, first = part.tile % work.column_tiles * kCols;
    const auto rows = static_cast<int>(p.m) - top - row;
    const std::int64_t tiles_left = (p.n - first) / 8 - weight_tile;
    const char* const x_from = static_cast<const char*>(p.x) + (std::int64_t{top + row} * p.x_row + chunk * 8) * 2;
    const char* const weights_from =
        static_cast<const char*>(p.weight) + (std::int64_t{first / 8 + weight_tile} * p.k + lane * 4) * 4;
    const typename Format::template Copies<kCols> scales(p, first, thread);
    for (int block = part.from; block < part.to; ++block) {
      if (issued >= S::kCount) wait_at(empty + stage * 8, (issued / S::kCount - 1) & 1);
      const std::uint32_t to = base + stage * S::kBytes;
      const int k0 = block * kPackedBlockK, x_bytes = k0 < width ? 16 : 0;
      const char* x = x_from + std::int64_t{k0} * 2;
#pragma unroll
      for (int i = 0; i < Rows / 8; ++i, x += p.x_row * 16) {
        copy_chunk(to + x_to + i * 1024, x, i * 8 < rows ? x_bytes : 0);
      }
      const char* weight = weights_from + std::int64_t{k0} * 4;
#pragma unroll
      for (int i = 0; i < S::kWeights / 16 / kCopy; ++i, weight += p.k * 16) {
        copy_chunk(to + S::kX + (thread + i * kCopy) * 16, weight, i * 4 < tiles_left ? 16 : 0);
      }
      scales.load(to + S::kX + S::kWeights, k0);
      commit_copies();
      if (issued >= S::kAhead) {
        wait_copies_but<S::kAhead>();
        publish(ready);
        ready = ready == S::kCount - 1 ? 0 : ready + 1;
      }
      ++issued;
      stage = stage == S::kCount - 1 ? 0 : stage + 1;
    }
  }
  wait_copies_but<0>();
  for (; ready != stage; ready = ready == S::kCount - 1 ? 0 : ready + 1) publish(ready);
}

// The sums of pair i and rows 8 r and following in acc[4 (Rows / 8 · i + r)] and the next three, as in
// packed_block.cuh.
template <class Format, class T, int Rows>
__device__ __forceinline__ void store_tile(const typename Format::Gemm& p, int top, int first,
                                           const float (&acc)[Stage<Format, Rows>::kSums]) {
  constexpr int kPairs = Stage<Format, Rows>::kPairs;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int tile = 0; tile < 2 * kPairs; ++tile) {
    const int column = first + (warp * 2 * kPairs + tile) * 8;
    const float* const sums = acc + tile / 2 * (Rows / 2) + tile % 2 * 2;
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

// acc += a stage's products, by the four warps of a warpgroup together: 16 columns each, all rows.
template <class Format, class T, int Rows>
__device__ __forceinline__ void multiply_by_warpgroup(const typename Format::Gemm& p, const unsigned char* here,
                                                      std::uint32_t address, int column,
                                                      float (&acc)[Stage<Format, Rows>::kSums]) {
  using S = Stage<Format, Rows>;
  using Column = typename Format::template Column<T, S::kCols>;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint64_t x = operand_at(address);
  const auto* const tiles = reinterpret_cast<const uint4*>(here + S::kX) + warp * 2 * 32 + lane;
  const unsigned char* const scales = here + S::kX + S::kWeights;
  Column low_column(p, scales, column), high_column(p, scales, column + 8);
  const uint4 low_words = tiles[0], high_words = tiles[32];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
    std::uint32_t low[4], high[4];
    low_column.prepare(j), high_column.prepare(j);
    low_column.unpack_word(j, word(low_words), low);
    high_column.unpack_word(j, word(high_words), high);
    std::uint32_t operand[2][4];
    operands_of_words(low, high, operand);
    warpgroup_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int step = 2 * j + half;
      warpgroup_mma<T>(acc, operand[half], operand_after(x, step / 4 * S::kHalf + step % 4 * 32));
    }
    warpgroup_commit();
    // The operand before this one is free. All are at a stage's end: ptxas keeps instructions of one turn of a loop
    // out of the next one by making all of them wait for each other. Meanwhile other warpgroups multiply.
    if (j < 3) {
      warpgroup_wait<1>();
    } else {
      warpgroup_wait<0>();
    }
  }
}

template <class Format, class T, int Rows>
__device__ __forceinline__ void multiply_stages(const typename Format::Gemm& p, const Work& work, unsigned char* stages,
                                                std::uint32_t base) {
  using S = Stage<Format, Rows>;
  const std::uint32_t full = base + S::kCount * S::kBytes, empty = full + S::kCount * 8;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int begin = work.begin_of(static_cast<int>(blockIdx.x));
  int stage = 0, parity = 0;
  for (int stop = work.begin_of(static_cast<int>(blockIdx.x) + 1); stop > begin;) {
    const Segment part = segment_before(work, begin, stop);
    stop -= part.to - part.from;
    float acc[S::kSums] = {};
    for (int block = part.from; block < part.to; ++block) {
      wait_at(full + stage * 8, parity);
      const unsigned char* const here = stages + stage * S::kBytes;
      const std::uint32_t address = base + stage * S::kBytes;
      if constexpr (S::kByWarps) {
        __syncwarp();  // lanes may have come out of the wait one after the other
        const auto* const words = reinterpret_cast<const std::uint32_t*>(here + S::kX) + warp * (2 * S::kPairs * 128);
        const std::uint32_t row = address + (lane & 7) * 128;
        const auto x_at = [&](int r, int j) {
          return row + r * 1024 + j / 2 * S::kHalf + (((j * 4 + (lane >> 3)) ^ lane) & 7) * 16;
        };
        multiply_block<Format, T, true, S::kPairs, Rows / 8, S::kCols>(p, words, 4, here + S::kX + S::kWeights,
                                                                       warp * 16 * S::kPairs, x_at, acc);
      } else {
        multiply_by_warpgroup<Format, T, Rows>(p, here, address, warp * 16 + lane / 4, acc);
      }
      __syncwarp();  // all lanes have read the stage
      if (lane < kArriving) arrive_at(empty + stage * 8);
      stage = stage == S::kCount - 1 ? 0 : stage + 1;
      parity ^= stage == 0 ? 1 : 0;
    }
    if (part.to < work.depth) {
      leave_partial<S::kMultiply>(work, acc);
    } else {
      if (part.from > 0) add_partials<S::kMultiply>(work, part.tile * work.depth, acc);
      store_tile<Format, T, Rows>(p, part.tile / work.column_tiles * Rows, part.tile % work.column_tiles * S::kCols,
                                  acc);
    }
  }
}

template <class Format, class T, int Rows>
__global__ void __launch_bounds__((Stage<Format, Rows>::kThreads), 1)
    stream_packed(typename Format::Gemm p, Work work) {
  using S = Stage<Format, Rows>;
  extern __shared__ __align__(128) unsigned char memory[];
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  if (threadIdx.x < S::kCount) {
    const std::uint32_t full = base + S::kCount * S::kBytes, empty = full + S::kCount * 8;
    make_barrier(full + threadIdx.x * 8, kCopy);
    make_barrier(empty + threadIdx.x * 8, S::kMultiply / 32 * kArriving);
  }
  __syncthreads();
  if (threadIdx.x >= S::kMultiply) {
    give_registers<S::kKept>();
    copy_stages<Format, Rows>(p, work, base);
  } else {
    take_registers<S::kTaken>();
    multiply_stages<Format, T, Rows>(p, work, memory + (base - start), base);
  }
}

// Rows of a tile, and how many thread blocks there are for m of them.
struct Plan {
  int rows = 0, row_tiles = 0, column_tiles = 0, depth = 0, blocks = 0;

  std::int64_t partials() const { return std::int64_t{blocks} * rows * columns_of(rows); }  // floats
};
inline Plan plan_of(const PackedGemm& p, std::int64_t m) {
  constexpr std::int64_t kLeastUnits = 2;  // of a thread block
  // What a second tile costs a thread block, whose sums go through memory, in units.
  constexpr std::int64_t kPartialUnits = 3;
  Plan out;
  // Tiles of 256 rows unpack half as often as those of 128, but may have more rows that are not there.
  out.rows = m <= 8 ? 8 : m <= 16 ? 16 : m <= 32 ? 32 : m <= 64 ? 64 : (m + 127) / 128 % 2 != 0 ? 128 : 256;
  out.row_tiles = static_cast<int>((m + out.rows - 1) / out.rows);
  const int columns = columns_of(out.rows);
  out.column_tiles = static_cast<int>((p.n + columns - 1) / columns);
  out.depth = static_cast<int>(p.k / kPackedBlockK);
  const std::int64_t tiles = std::int64_t{out.row_tiles} * out.column_tiles, units = tiles * out.depth;
  const std::int64_t blocks = units / kLeastUnits < 1 ? 1 : units / kLeastUnits;
  out.blocks = static_cast<int>(blocks < p.multiprocessors ? blocks : p.multiprocessors);
  // Whole tiles for every thread block, where that leaves few multiprocessors idle.
  const std::int64_t each = (tiles + p.multiprocessors - 1) / p.multiprocessors;
  if (out.rows >= 64 && tiles % each == 0 && each * out.depth <= units / p.multiprocessors + kPartialUnits) {
    out.blocks = static_cast<int>(tiles / each);
  }
  return out;
}

template <class Format, class T, int Rows>
int launch_stream(const typename Format::Gemm& p, const Plan& plan, Stream stream) {
  Work work;
  work.column_tiles = plan.column_tiles, work.depth = plan.depth;
  work.units = plan.row_tiles * plan.column_tiles * plan.depth;
  work.flags = reinterpret_cast<unsigned long long*>(p.workspace);
  work.partials = p.workspace + 2 * ((p.multiprocessors + 15) / 16 * 16);
  work.token = fresh_token();
  static_assert(Stage<Format, Rows>::kShared <= kPackedSharedOfStream);
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(plan.blocks));
  how.threads = Stage<Format, Rows>::kThreads, how.shared_bytes = Stage<Format, Rows>::kShared;
  return launch_kernel(stream_packed<Format, T, Rows>, how, stream, p, work);
}

// Up to 16 rows a format may have another way: Few. With more its sums of x cost the tensor cores too much.
template <class Format, class Few, class T>
int stream_of(const typename Format::Gemm& p, const Plan& plan, Stream stream) {
  switch (plan.rows) {
    case 8:
      return launch_stream<Few, T, 8>(p, plan, stream);
    case 16:
      return launch_stream<Few, T, 16>(p, plan, stream);
    case 32:
      return launch_stream<Format, T, 32>(p, plan, stream);
    case 64:
      return launch_stream<Format, T, 64>(p, plan, stream);
    case 128:
      return launch_stream<Format, T, 128>(p, plan, stream);
    default:
      return launch_stream<Format, T, 256>(p, plan, stream);
  }
}

inline std::size_t stream_workspace(const PackedGemm& p) {
  const Plan plan = plan_of(p, p.m < kPackedStreamRows ? p.m : kPackedStreamRows);
  return static_cast<std::size_t>((p.multiprocessors + 15) / 16 * 16 * 8 + plan.partials() * 4);  // flags, sums
}

template <class Format, class Few = Format>
int stream_packed_rows(const typename Format::Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8 || !p.has_wgmma || p.n > (1 << 24) || p.k > (1 << 24)) return kNoKernel;
  if (p.dtype != Scalar::kFloat16 && p.dtype != Scalar::kBFloat16) return kNoKernel;
  for (std::int64_t first = 0; first < p.m; first += kPackedStreamRows) {
    typename Format::Gemm part = p;
    part.m = p.m - first < kPackedStreamRows ? p.m - first : kPackedStreamRows;
    part.x = static_cast<const char*>(p.x) + first * p.x_row * 2;
    part.out = static_cast<char*>(p.out) + first * p.n * 2;
    const Plan plan = plan_of(part, part.m);
    if (std::int64_t{plan.row_tiles} * plan.column_tiles * plan.depth > (1 << 30)) return kNoKernel;
    const int code = p.dtype == Scalar::kFloat16 ? stream_of<Format, Few, __half>(part, plan, stream)
                                                 : stream_of<Format, Few, __nv_bfloat16>(part, plan, stream);
    if (code != 0) return code;
  }
  return 0;
}

}  // namespace
}  // namespace untorch::kernels::cuda
