// W4A16 GEMM for any M on sm_80 and newer: mma.sync from a multistage cp.async pipeline, with split-K.
//
// CTA tile TileM × 128, TileM 16, 32, 64 or 128; 8 warps; 4 stages (3 for TileM 128), of which one is being read.
//
//   a stage in shared memory, one k block (128 k)
//     x        [TileM] rows of 256 bytes, 16-byte chunks XOR-swizzled by row: ldmatrix without bank conflicts
//     weight   [16] 8-column tiles of 512 bytes, as packed
//     scales   as `Format` has them
//   warps      4 along N, 32 columns each, by 2 along M (TileM 128) or along K (TileM up to 64)
//
// The weight is the A operand of mma.m16n8k16 (16 columns × 16 k), dequantized in registers, as in w4a16_gemv.cuh; its
// fragments are used for every 8 rows of the warp. Split-K over CTAs: tile_sm80.cuh.
//
// Bytes: 0.53 (int4, group 128) or 0.56 (NVFP4) a weight for each tile in M; x 2·M·K for each tile in N, from L2.
// Operations: 2·M·N·K on the tensor cores. A warp dequantizes 1024 weights with 60 instructions (int4) or 90 (NVFP4)
// for 4 mma.sync every 8 rows, so from about M = 32 on the tensor cores are what is busy. On an H200 it is memory-bound
// up to about M = 90.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/heuristic.h"
#include "kernels/cuda/w4a16/tile_sm80.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class Format, int TileM>
struct Sm80Stage {
  static constexpr int kXBytes = TileM * 2 * kW4A16BlockK;
  static constexpr int kStageBytes = kXBytes + kWeightBytes + kTileN * Format::kScaleBytesPerColumn;
  static constexpr int kStages = TileM == 128 ? 3 : 4;  // what an SM of sm_80 has room for
};
template <class Format, int TileM>
constexpr int sm80_shared_bytes() {
  constexpr int stages = Sm80Stage<Format, TileM>::kStages * Sm80Stage<Format, TileM>::kStageBytes,
                sums = TileM * kAccStride * 4;
  return stages > sums ? stages : sums;
}

// Wide: inner_k_tiles is 8, a lane's four words are one 16-byte load.
template <class Format, class T, bool Wide, int TileM>
__global__ void __launch_bounds__(kThreads, TileM >= 64 ? 1 : 2)
    w4a16_gemm_sm80_kernel(typename Format::Gemm p, SplitK split) {
  using S = Sm80Stage<Format, TileM>;
  using ColumnScales = typename Format::template ColumnScales<T, kTileN, const std::uint32_t*>;
  constexpr bool kWarpSplitK = TileM <= 64;  // warps 4 to 7 have the other half of the k block
  constexpr int kWarpM = kWarpSplitK ? TileM : TileM / 2, kMTiles = kWarpM / 8, kWords = kWarpSplitK ? 2 : 4;
  constexpr int kStages = S::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, warp_n = warp % 4, warp_half = warp / 4;
  const int rank = split.rank();
  const int n0 = static_cast<int>(blockIdx.x) / split.splits * kTileN, m0 = static_cast<int>(blockIdx.y) * TileM;
  const int lane_words = p.inner_k_tiles / 2;
  const int k_blocks = static_cast<int>((p.k + kW4A16BlockK - 1) / kW4A16BlockK);
  const int begin = rank * split.k_blocks, end = begin + split.k_blocks < k_blocks ? begin + split.k_blocks : k_blocks;
  const std::uint32_t base = shared_address(memory);

  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
  const StageLoader<Format> loader(p, m0, n0, row * 256 + ((chunk ^ (row & 7)) << 4));

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) loader.template load<TileM, 16 * 256, S::kXBytes>(base + i * S::kStageBytes, begin + i);
    cp_async_commit();
  }

  float acc[2][kMTiles][4] = {};
  const int warp_m0 = kWarpSplitK ? 0 : warp_half * kWarpM, word0 = kWarpSplitK ? warp_half * 2 : 0;
  int stage = 0;
  for (int k_block = begin; k_block < end; ++k_block) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // this stage has arrived, and no warp reads the one before it
    {
      const int next = stage == 0 ? kStages - 1 : stage - 1;
      if (k_block + kStages - 1 < end) {
        loader.template load<TileM, 16 * 256, S::kXBytes>(base + next * S::kStageBytes, k_block + kStages - 1);
      }
      cp_async_commit();
    }
    const unsigned char* const here = memory + stage * S::kStageBytes;
    const std::uint32_t x = base + stage * S::kStageBytes + (warp_m0 + (lane & 7)) * 256;
    const auto* const words = reinterpret_cast<const std::uint32_t*>(here + S::kXBytes) + warp_n * 4 * 128;
    const auto* const scales = reinterpret_cast<const std::uint32_t*>(here + S::kXBytes + kWeightBytes);
    ColumnScales scales_of[4] = {
        {p, scales, warp_n * 32 + g},
        {p, scales, warp_n * 32 + g + 8},
        {p, scales, warp_n * 32 + g + 16},
        {p, scales, warp_n * 32 + g + 24},
    };
    std::uint32_t word[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Wide && kWords == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(words + i * 128 + lane * 4);
        word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
      } else if constexpr (Wide) {
        const uint2 v = *reinterpret_cast<const uint2*>(words + i * 128 + lane * 4 + word0);
        word[i][0] = v.x, word[i][1] = v.y;
      } else {
#pragma unroll
        for (int j = 0; j < kWords; ++j) word[i][j] = words[i * 128 + word_index(lane_words, word0 + j, lane)];
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      std::uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scales_of[i].prepare(word0 + j);
        scales_of[i].dequantize_word(word0 + j, word[i][j], a[i]);
      }
      const std::uint32_t chunk = ((word0 + j) * 4 + (lane >> 3)) ^ (lane & 7);
#pragma unroll
      for (int r = 0; r < kMTiles; ++r) {
        std::uint32_t b[4];
        ldmatrix_x4(b, x + r * (8 * 256) + (chunk << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(acc[i][r], a[2 * i][0], a[2 * i + 1][0], a[2 * i][1], a[2 * i + 1][1], b[0], b[1]);
          mma<T>(acc[i][r], a[2 * i][2], a[2 * i + 1][2], a[2 * i][3], a[2 * i + 1][3], b[2], b[3]);
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();

  if constexpr (Format::kHasGlobalScale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = Format::template global_scale<T>(p, std::int64_t{n0 + warp_n * 32 + i * 8 + g});
#pragma unroll
      for (int r = 0; r < kMTiles; ++r) acc[i / 2][r][i % 2 * 2] *= scale, acc[i / 2][r][i % 2 * 2 + 1] *= scale;
    }
  }

  // Accumulators to shared memory, [row][column], over the stages.
  float* const sums = reinterpret_cast<float*>(memory);
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < kMTiles; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int row = warp_m0 + r * 8 + 2 * t + (v & 1), column = warp_n * 32 + i * 16 + g + (v >> 1) * 8;
          body(sums[row * kAccStride + column], acc[i][r][v]);
        }
      }
    }
  };
  if (!kWarpSplitK || warp_half == 0) each([](float& to, float value) { to = value; });
  if (kWarpSplitK) {
    __syncthreads();
    if (warp_half == 1) each([](float& to, float value) { to += value; });
  }
  __syncthreads();

  epilogue<T, TileM>(p, split, sums, m0, n0);
}

template <class Format, class T, bool Wide, int TileM>
int launch_gemm_sm80(const typename Format::Gemm& p, Stream stream) {
  constexpr int kStageBytes = sm80_shared_bytes<Format, TileM>();
  static_assert(kStageBytes <= (TileM == 128 ? kSm80SharedBytesM128 : kSm80SharedBytesM64));
  return launch_split_k<TileM>(w4a16_gemm_sm80_kernel<Format, T, Wide, TileM>, p, kStageBytes, stream);
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
  const SplitK split = choose_split_k(p, sm80_tile_m(p.m, p.max_shared_bytes));
  return split.splits == 1 || split.cluster ? 0 : static_cast<std::size_t>(split.splits * p.m * p.n) * sizeof(float);
}

}  // namespace
}  // namespace untorch::kernels::cuda
