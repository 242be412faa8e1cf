// MoE grouped GEMM on sm_80 and newer: mma.sync from a multistage cp.async pipeline, tiles of one expert.
//
// CTA tile TileM × TileN: TileM 8, 16, 32 or 64 rows of one expert (an ExpertTile), TileN 64 rows of its weight, or 128
// from TileM 32 on. 8 warps: 4 along N, 16 or 32 each; the other 4 take the other half of a stage's k.
//
//   a stage in shared memory: 256 k (TileM up to 16) or 128; 4 stages, 3 for TileM 64
//     x        [k / 64][TileM] rows of 128 bytes, 16-byte chunks XOR-swizzled by row
//     weight   32 bytes a row for 64 k, and scales, as `Format` has them
//
// The weight is the A operand of mma.m16n8k16 (16 weight rows × 16 k), dequantized in registers, and used for every 8
// rows of x. The two halves of k are reduced in shared memory, over the stages.
//
// Bytes: 0.5 a weight and its share of scales (0.5625 for NVFP4, 0.53 for int4 with groups of 128) for every tile in M,
// from memory the first time; x 2·TileM·K for every 64 or 128 weight rows, from L2. Operations: for 16 weight rows and
// 64 k a warp issues some 80 instructions to dequantize NVFP4, and 6 for every 8 rows of x, 4 of them mma.sync. Up to
// TileM 16 memory is the bound, but not by much: beside its loads an SM dequantizes 21 bytes a clock, and an H200's
// memory delivers 18. At TileM 64, ldmatrix and the tensor cores take equally long.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/moe/moe_tile.cuh"

namespace untorch::kernels::cuda {

template <class Format, int TileM>
struct MoeSm80Config {
  static constexpr int kThreads = 256, kTileM = TileM, kWarpSplitK = 2;  // two halves of k
  static constexpr int kWarpTiles = TileM <= 16 ? 1 : 2;                 // of 16 weight rows
  static constexpr int kTileN = 64 * kWarpTiles;
  static constexpr int kKGroups = TileM <= 16 ? 4 : 2;  // of 64 k, in a stage
  static constexpr int kWeightBytes = kTileN * kKGroups * 32, kXBytes = TileM * kKGroups * 128,
                       kScaleBytes = kTileN * kKGroups * Format::kScaleBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes + kScaleBytes;
  static constexpr int kStages = TileM == 64 ? 3 : 4;  // sm_90 has room for four CTAs of TileM 8, sm_80 for two of 64
  // CTAs an SM that registers are to allow.
  static constexpr int kCtasPerSm = TileM == 8 ? 4 : TileM == 16 ? 3 : 2;
  static constexpr int kAccStride = kTileN + 4;  // in floats: no bank conflicts
  static constexpr int kAccPlane = TileM * kAccStride, kAccumulatorBytes = kWarpSplitK * kAccPlane * 4;
  static constexpr int kAlign = 0, kSharedBytes = kStages * kStageBytes > kAccumulatorBytes ? kStages *kStageBytes
                                                                                            : kAccumulatorBytes;
};

template <class Format, class T, int TileM, bool GateUp>
__global__ void __launch_bounds__(MoeSm80Config<Format, TileM>::kThreads, (MoeSm80Config<Format, TileM>::kCtasPerSm))
    moe_gemm_sm80_kernel(typename Format::Moe p, int tiles_n) {
  using Config = MoeSm80Config<Format, TileM>;
  using Rows = typename Format::template Rows<T, Config>;
  constexpr int kWarpTiles = Config::kWarpTiles, kStages = Config::kStages, kKGroups = Config::kKGroups;
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int tile_index = static_cast<int>(blockIdx.x) / tiles_n;
  const ExpertTile tile = p.tiles[tile_index];
  if (tile.rows == 0) return;
  const int n0 = (static_cast<int>(blockIdx.x) - tile_index * tiles_n) * (GateUp ? Config::kTileN / 2 : Config::kTileN);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, warp_n = warp % 4, warp_k = warp / 4;
  const std::uint32_t base = shared_address(memory);
  MoeStageLoader<Format, Config, GateUp> loader(p, tile, n0);
  const int steps = loader.steps();

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) loader.load(memory + i * Config::kStageBytes, base + i * Config::kStageBytes);
    cp_async_commit();
  }

  float acc[kWarpTiles][TileM / 8][4] = {};
  const auto mma_stage = [&](int stage, int step) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // this stage has arrived, and no warp reads the one before it
    if (step + kStages - 1 < steps) {
      const int next = (stage == 0 ? kStages - 1 : stage - 1) * Config::kStageBytes;
      loader.load(memory + next, base + next);
    }
    cp_async_commit();
    const unsigned char* const here = memory + stage * Config::kStageBytes;
    const std::uint32_t x = base + stage * Config::kStageBytes + (lane & 7) * 128;
    const int first_group = warp_k * (kKGroups / 2);
    Rows rows[kWarpTiles * 2];  // of 8 weight rows each
#pragma unroll
    for (int j = 0; j < kWarpTiles * 2; ++j) {
      rows[j].begin(p, here + Config::kXBytes, (warp_n * kWarpTiles * 2 + j) * 8 + g, first_group);
    }
#pragma unroll
    for (int i = 0; i < kKGroups / 2; ++i) {
      const int group = first_group + i;
#pragma unroll
      for (int j = 0; j < kWarpTiles * 2; ++j) rows[j].load(i);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t pairs[kWarpTiles][2][4];
#pragma unroll
        for (int j = 0; j < kWarpTiles * 2; ++j) rows[j].dequantize(i, w, pairs[j / 2][j % 2]);
#pragma unroll
        for (int r = 0; r < TileM / 8; ++r) {
          std::uint32_t b[4];
          ldmatrix_x4(b, x + group * (TileM * 128) + r * 1024 + (((w * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
          for (int j = 0; j < kWarpTiles; ++j) {
            const auto& low = pairs[j][0];
            const auto& high = pairs[j][1];
            mma<T>(acc[j][r], low[0], high[0], low[1], high[1], b[0], b[1]);
            mma<T>(acc[j][r], low[2], high[2], low[3], high[3], b[2], b[3]);
          }
        }
      }
    }
  };
  // At small TileM address arithmetic is a good part of the instructions: the stage is a compile-time constant.
  if constexpr (TileM <= 16) {
    for (int step = 0; step < steps; step += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (step + stage < steps) mma_stage(stage, step + stage);
      }
    }
  } else {
    for (int step = 0, stage = 0; step < steps; ++step) {
      mma_stage(stage, step);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
  }
  cp_async_wait_group<0>();
  __syncthreads();

  float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int j = 0; j < kWarpTiles; ++j) {
#pragma unroll
    for (int r = 0; r < TileM / 8; ++r) {
      float* const to =
          sums + (warp_k * TileM + r * 8 + 2 * t) * Config::kAccStride + (warp_n * kWarpTiles + j) * 16 + g;
      to[0] = acc[j][r][0], to[Config::kAccStride] = acc[j][r][1];
      to[8] = acc[j][r][2], to[Config::kAccStride + 8] = acc[j][r][3];
    }
  }
  __syncthreads();
  if constexpr (GateUp) {
    epilogue_gate_up<Format, T, Config>(p, tile, n0, sums);
  } else {
    epilogue_down<Format, T, Config>(p, tile, n0, sums);
  }
}

template <class Format, class T, int TileM, bool GateUp>
int launch_gemm_sm80(const typename Format::Moe& p, Stream stream) {
  using Config = MoeSm80Config<Format, TileM>;
  return launch_moe_gemm<Format, Config, GateUp>(moe_gemm_sm80_kernel<Format, T, TileM, GateUp>, p, stream);
}

template <class Format, class T, bool GateUp>
int moe_gemm_sm80_for_m(const typename Format::Moe& p, Stream stream) {
  if (p.tile_m == 8) return launch_gemm_sm80<Format, T, 8, GateUp>(p, stream);
  if (p.tile_m == 16) return launch_gemm_sm80<Format, T, 16, GateUp>(p, stream);
  if (p.tile_m == 32) return launch_gemm_sm80<Format, T, 32, GateUp>(p, stream);
  return p.tile_m == 64 ? launch_gemm_sm80<Format, T, 64, GateUp>(p, stream) : kNoKernel;
}

template <class Format, bool GateUp>
int moe_gemm_sm80(const typename Format::Moe& p, Stream stream) {
  if (p.dtype == DType::kFloat16) return moe_gemm_sm80_for_m<Format, __half, GateUp>(p, stream);
  return p.dtype == DType::kBFloat16 ? moe_gemm_sm80_for_m<Format, __nv_bfloat16, GateUp>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
