// Products of some hundreds of rows with int4 weights, by the tensor instructions of sm_90.
//
// Layout: a block makes a tile of 128 columns and Rows rows (128 or 256), from blocks of 128 k's in shared memory: x's
// rows in two halves of 64 k's, 128 bytes each, permuted as the instruction's 128-byte swizzle wants them; weights and
// scales as in packed_mma.cuh. cp.async fills four stages (three for 256 rows). Two warpgroups have 64 columns each.
// The weights are the instruction's first operand, which may be in registers: a warp's 16 columns and 16 k's lie in
// them as in mma.m16n8k16, so they are unpacked there as everywhere; x is the second one, 128 rows an instruction, from
// shared memory. Of a stage, a warpgroup unpacks the next 32 k's while the tensor cores work on the last.
//
// Bytes: of shared memory a stage, (256 Rows + 10240); from the second-level cache likewise. Operations: 2·m·n·k. For
// 16 k's a warp issues some 40 instructions beside Rows / 128 of 64 clocks on the tensor cores, which two warpgroups
// share: arithmetic is the bound from about 90 rows on. The share that is reached has not been measured yet.
#include "kernels/cuda/int4_choice.h"
#include "kernels/cuda/int4_scales.cuh"
#include "kernels/cuda/packed_tile.cuh"
#include "kernels/cuda/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kPart = 128;  // rows of x an instruction
constexpr int kScaleBytes = kCols * Int4Tile::kColumnBytes;

template <int Rows>
struct Stage {
  static constexpr int kHalf = Rows * 128, kX = 2 * kHalf;
  static constexpr int kBytes = kX + kWeightBytes + kScaleBytes;  // a multiple of 1024, as the swizzle wants it
  static constexpr int kCount = Rows == 256 ? 3 : 4;
  static constexpr int kShared = kCount * kBytes + 1024;  // to begin at a multiple of it
};
static_assert(Stage<256>::kShared == kInt4SharedOfWgmma && Stage<256>::kBytes % 1024 == 0);
static_assert(Stage<128>::kShared <= kInt4SharedOfWgmma && Stage<128>::kBytes % 1024 == 0);

template <class T, int Rows>
__global__ void __launch_bounds__(kThreads, 1) wgmma_int4(Int4Gemm p, Split split) {
  using S = Stage<Rows>;
  constexpr int kParts = Rows / kPart, kStages = S::kCount;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const int first = static_cast<int>(blockIdx.x) / split.parts * kCols, top = static_cast<int>(blockIdx.y) * Rows;
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1;
  const int blocks = static_cast<int>(p.k / kPackedBlockK);
  const int begin = split.rank() * split.depth, end = begin + split.depth < blocks ? begin + split.depth : blocks;
  // Every block of a cluster pads alike: its shared memory begins at the same address.
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  unsigned char* const stages = memory + (base - start);

  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
  const StageCopies<Int4Tile> copies(p, top, first, chunk / 8 * S::kHalf + row * 128 + (((chunk ^ row) & 7) << 4));

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copies.load<Rows, 16 * 128, S::kX>(base + i * S::kBytes, begin + i);
    commit_copies();
  }

  float acc[kParts][64] = {};
  int stage = 0;
  for (int block = begin; block < end; ++block) {
    wait_copies_but<kStages - 2>();
    publish_shared();
    __syncthreads();  // this stage is here, and the tensor cores are done with the one before it
    const unsigned char* const here = stages + stage * S::kBytes;
    const std::uint32_t x = base + stage * S::kBytes;
    const auto* const tiles = reinterpret_cast<const uint4*>(here + S::kX) + warp * 2 * 32 + lane;
    const auto* const scales = reinterpret_cast<const std::uint32_t*>(here + S::kX + kWeightBytes) + warp * 16 + g;
    const uint4 low_words = tiles[0], high_words = tiles[32];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const auto word = [&](const uint4& v) { return j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w; };
      const int line = (j * 32 >> group_bits) * kCols;
      std::uint32_t low[4], high[4];
      unpack<T>(word(low_words), scale_pair(scales[line]), low);
      unpack<T>(word(high_words), scale_pair(scales[line + 8]), high);
      std::uint32_t operand[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        operand[half][0] = low[2 * half], operand[half][1] = high[2 * half];
        operand[half][2] = low[2 * half + 1], operand[half][3] = high[2 * half + 1];
      }
      warpgroup_fence();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int step = 2 * j + half;
#pragma unroll
        for (int r = 0; r < kParts; ++r) {
          warpgroup_mma<T>(acc[r], operand[half],
                           operand_at(x + step / 4 * S::kHalf + r * (kPart * 128) + step % 4 * 32));
        }
      }
      warpgroup_commit();
      // The operand before this one is free. All are at a stage's end: ptxas keeps instructions of one turn of a loop
      // out of the next one by making all of them wait for each other.
      if (j < 3) {
        warpgroup_wait<1>();
      } else {
        warpgroup_wait<0>();
      }
      if (j == 0) {
        const int next = stage == 0 ? kStages - 1 : stage - 1;
        if (block + kStages - 1 < end) {
          copies.load<Rows, 16 * 128, S::kX>(base + next * S::kBytes, block + kStages - 1);
        }
        commit_copies();
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  warpgroup_wait<0>();
  wait_copies_but<0>();
  __syncthreads();

  // The sums take the stages' place, [row][column].
  float* const sums = reinterpret_cast<float*>(stages);
#pragma unroll
  for (int r = 0; r < kParts; ++r) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int row = r * kPart + i / 4 * 8 + 2 * t + (i & 1), column = warp * 16 + g + (i >> 1 & 1) * 8;
      sums[row * kPitch + column] = acc[r][i];
    }
  }
  __syncthreads();
  finish_tile<T, Rows>(p, split, sums, top, first);
}

template <class T>
int wgmma_of(const Int4Gemm& p, Stream stream) {
  return int4_wgmma_rows(p.m) == 128 ? launch_tiles<128>(wgmma_int4<T, 128>, p, Stage<128>::kShared, stream)
                                     : launch_tiles<256>(wgmma_int4<T, 256>, p, Stage<256>::kShared, stream);
}

}  // namespace

int int4_wgmma(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.inner_k_tiles != 8 || !p.has_wgmma || !p.has_clusters) return kNoKernel;
  if (p.dtype == Scalar::kFloat16) return wgmma_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? wgmma_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
