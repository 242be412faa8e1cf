// Products of some dozens of rows with packed weights of four bits.
//
// Layout: a block makes a tile of 128 columns and Rows rows (16 to 128) from blocks of 128 k's in shared memory: x's
// rows, 256 bytes each, in 16-byte chunks permuted so that ldmatrix's eight rows come from different groups of banks;
// the weights as they are, 512 bytes for every 8 columns; the scales, as `Format` has them. cp.async fills four stages
// (three for 128 rows), of which one is used. Of the 8 warps four stand side by side, 32 columns each; the other four
// take the other half of the rows, or of each block's k where there are up to 64. Weights are unpacked in registers:
// they are the matrix instruction's first operand, as in w4a16_gemv.cuh, 16 columns and 16 k's, and used for every 8
// rows of the warp.
//
// How k is shared between blocks: tile_sm80.cuh.
//
// Bytes: 0.53 a weight (int4, group 128) or 0.56 (NVFP4) for every 128 rows, x 2·m·k for every 128 columns from the
// second-level cache. Operations: 2·m·n·k on the tensor cores; a warp unpacks 1024 weights with 60 (int4) or 90
// instructions for 4 matrix instructions every 8 rows, so that from about 32 rows on it is the tensor cores that are
// busy. On an H200 memory is the bound to about 90 rows.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/tile_sm80.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class Format, int Rows>
struct Stage {
  static constexpr int kX = Rows * 2 * kW4A16BlockK;
  static constexpr int kBytes = kX + kWeightBytes + kCols * Format::kColumnBytes;
  static constexpr int kCount = Rows == 128 ? 3 : 4;  // what a multiprocessor of sm_80 has room for
};
template <class Format, int Rows>
constexpr int shared_bytes() {
  constexpr int stages = Stage<Format, Rows>::kCount * Stage<Format, Rows>::kBytes, sums = Rows * kPitch * 4;
  return stages > sums ? stages : sums;
}

// Wide: inner_k_tiles is 8, a lane's four words lie together.
template <class Format, class T, bool Wide, int Rows>
__global__ void __launch_bounds__(kThreads, Rows >= 64 ? 1 : 2) mma_packed(typename Format::Gemm p, Split split) {
  using S = Stage<Format, Rows>;
  using Column = typename Format::template Column<T, kCols, const std::uint32_t*>;
  constexpr bool kHalves = Rows <= 64;  // the second four warps have the other half of k
  constexpr int kWarpRows = kHalves ? Rows : Rows / 2, kTiles = kWarpRows / 8, kWords = kHalves ? 2 : 4;
  constexpr int kStages = S::kCount;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, side = warp % 4, other = warp / 4;
  const int rank = split.rank();
  const int first = static_cast<int>(blockIdx.x) / split.parts * kCols, top = static_cast<int>(blockIdx.y) * Rows;
  const int lane_words = p.inner_k_tiles / 2;
  const int blocks = static_cast<int>((p.k + kW4A16BlockK - 1) / kW4A16BlockK);
  const int begin = rank * split.depth, end = begin + split.depth < blocks ? begin + split.depth : blocks;
  const std::uint32_t base = shared_address(memory);

  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
  const StageCopies<Format> copies(p, top, first, row * 256 + ((chunk ^ (row & 7)) << 4));

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copies.template load<Rows, 16 * 256, S::kX>(base + i * S::kBytes, begin + i);
    commit_copies();
  }

  float acc[2][kTiles][4] = {};
  const int first_row = kHalves ? 0 : other * kWarpRows, first_word = kHalves ? other * 2 : 0;
  int stage = 0;
  for (int block = begin; block < end; ++block) {
    wait_copies_but<kStages - 2>();
    __syncthreads();  // this stage is here, and nobody reads the one before it any more
    {
      const int next = stage == 0 ? kStages - 1 : stage - 1;
      if (block + kStages - 1 < end) {
        copies.template load<Rows, 16 * 256, S::kX>(base + next * S::kBytes, block + kStages - 1);
      }
      commit_copies();
    }
    const unsigned char* const here = memory + stage * S::kBytes;
    const std::uint32_t x = base + stage * S::kBytes + (first_row + (lane & 7)) * 256;
    const auto* const words = reinterpret_cast<const std::uint32_t*>(here + S::kX) + side * 4 * 128;
    const auto* const scales = reinterpret_cast<const std::uint32_t*>(here + S::kX + kWeightBytes);
    Column columns[4] = {
        {p, scales, side * 32 + g},
        {p, scales, side * 32 + g + 8},
        {p, scales, side * 32 + g + 16},
        {p, scales, side * 32 + g + 24},
    };
    std::uint32_t word[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Wide && kWords == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(words + i * 128 + lane * 4);
        word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
      } else if constexpr (Wide) {
        const uint2 v = *reinterpret_cast<const uint2*>(words + i * 128 + lane * 4 + first_word);
        word[i][0] = v.x, word[i][1] = v.y;
      } else {
#pragma unroll
        for (int j = 0; j < kWords; ++j) word[i][j] = words[i * 128 + word_at(lane_words, first_word + j, lane)];
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      std::uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        columns[i].prepare(first_word + j);
        columns[i].unpack_word(first_word + j, word[i][j], a[i]);
      }
      const std::uint32_t chunk = ((first_word + j) * 4 + (lane >> 3)) ^ (lane & 7);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        std::uint32_t b[4];
        load_matrices(b, x + r * (8 * 256) + (chunk << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(acc[i][r], a[2 * i][0], a[2 * i + 1][0], a[2 * i][1], a[2 * i + 1][1], b[0], b[1]);
          mma<T>(acc[i][r], a[2 * i][2], a[2 * i + 1][2], a[2 * i][3], a[2 * i + 1][3], b[2], b[3]);
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();

  if constexpr (Format::kScalesSums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float factor = Format::template factor<T>(p, std::int64_t{first + side * 32 + i * 8 + g});
#pragma unroll
      for (int r = 0; r < kTiles; ++r) acc[i / 2][r][i % 2 * 2] *= factor, acc[i / 2][r][i % 2 * 2 + 1] *= factor;
    }
  }

  // The sums take the stages' place, [row][column].
  float* const sums = reinterpret_cast<float*>(memory);
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int row = first_row + r * 8 + 2 * t + (v & 1), column = side * 32 + i * 16 + g + (v >> 1) * 8;
          body(sums[row * kPitch + column], acc[i][r][v]);
        }
      }
    }
  };
  if (!kHalves || other == 0) each([](float& to, float value) { to = value; });
  if (kHalves) {
    __syncthreads();
    if (other == 1) each([](float& to, float value) { to += value; });
  }
  __syncthreads();

  finish_tile<T, Rows>(p, split, sums, top, first);
}

template <class Format, class T, bool Wide, int Rows>
int launch_gemm_sm80(const typename Format::Gemm& p, Stream stream) {
  constexpr int kBytes = shared_bytes<Format, Rows>();
  static_assert(kBytes <= (Rows == 128 ? kSm80SharedBytesM128 : kSm80SharedBytesM64));
  return launch_tiles<Rows>(mma_packed<Format, T, Wide, Rows>, p, kBytes, stream);
}

template <class Format, class T, bool Wide>
int gemm_sm80_for_m(const typename Format::Gemm& p, Stream stream) {
  switch (sm80_tile_m(p.m, p.max_shared_bytes)) {
    case 16:
      return launch_gemm_sm80<Format, T, Wide, 16>(p, stream);
    case 32:
      return launch_gemm_sm80<Format, T, Wide, 32>(p, stream);
    case 64:
      return launch_gemm_sm80<Format, T, Wide, 64>(p, stream);
    default:
      return launch_gemm_sm80<Format, T, Wide, 128>(p, stream);
  }
}

inline std::size_t gemm_sm80_workspace(const W4A16Gemm& p) {
  const Split split = split_of(p, sm80_tile_m(p.m, p.max_shared_bytes));
  return split.parts == 1 || split.cluster ? 0 : static_cast<std::size_t>(split.parts * p.m * p.n) * sizeof(float);
}

}  // namespace
}  // namespace untorch::kernels::cuda
