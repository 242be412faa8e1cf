// MoE grouped GEMM on sm_90a, for large M per expert: WGMMA from a multistage cp.async pipeline.
//
// CTA tile TileM × 256: up to 160 rows of one expert (an ExpertTile), with mainloops for 32, 64, 128 and 160; four
// warpgroups of 64 weight rows each. Three stages of 128 k, as in moe_gemm_sm80.cuh, x with WGMMA's 128-byte swizzle.
// The weight is the A operand, dequantized in registers (fragments as in mma.m16n8k16); x is the B operand, from shared
// memory. A warpgroup dequantizes the next 32 k while its WGMMAs of the last 32 run.
//
// Bytes: of shared memory, and from L2, a stage 256·M + 18432 (NVFP4) or 20480 (int4): x is what costs, so TileN is
// large. Operations: for 32 k a warp issues some 70 instructions, 280 clocks for the 16 warps, beside 2·M clocks of
// WGMMA. At small M memory is the bound, and instructions take as long; from about M = 140 on it is the tensor cores,
// but for the start of a stage, when they wait for the first words. The share that is reached has not been measured
// yet.
#pragma once

#include "kernels/cuda/moe/moe_tile.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kMaxWgmmaN = 128;  // rows of x in one WGMMA here

template <class Format>
struct MoeSm90Config {
  static constexpr int kThreads = 512, kTileM = kMoeSm90TileM, kWarpSplitK = 1, kTileN = 256, kKGroups = 2, kStages = 3;
  static constexpr int kXGroupBytes = kTileM * 128, kXBytes = kKGroups * kXGroupBytes;
  static constexpr int kWeightBytes = kTileN * kKGroups * 32, kScaleBytes = kTileN * kKGroups * Format::kScaleBytes;
  static constexpr int kStageBytes = kXBytes + kWeightBytes + kScaleBytes;
  static constexpr int kAccStride = kTileN + 4, kAccPlane = kTileM * kAccStride, kAccumulatorBytes = kAccPlane * 4;
  static constexpr int kAlign = 1024, kSharedBytes = kStages * kStageBytes + kAlign;  // to begin at a multiple of it
  static_assert(kAccumulatorBytes <= kStages * kStageBytes && kStageBytes % 1024 == 0 && kXGroupBytes % 1024 == 0);
};

// sums [row][kAccStride] = x · weightᵀ for the first M rows of the tile.
template <class Format, class T, int M, bool GateUp>
__device__ __forceinline__ void mainloop(const typename Format::Moe& p,
                                         MoeStageLoader<Format, MoeSm90Config<Format>, GateUp>& loader,
                                         unsigned char* memory, std::uint32_t base) {
  using Config = MoeSm90Config<Format>;
  using Rows = typename Format::template Rows<T, Config>;
  constexpr int kStages = Config::kStages, kFirstN = M < kMaxWgmmaN ? M : kMaxWgmmaN, kSecondN = M - kFirstN;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, weight_row = warp * 16 + g;
  const int steps = loader.steps();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) loader.template load<M>(memory + i * Config::kStageBytes, base + i * Config::kStageBytes);
    cp_async_commit();
  }
  float acc[kFirstN / 2] = {}, acc2[kSecondN > 0 ? kSecondN / 2 : 1] = {};
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    cp_async_wait_group<kStages - 2>();
    fence_proxy_async();
    __syncthreads();  // this stage has arrived, and the WGMMAs of the one before it are done
    const unsigned char* const weights = memory + stage * Config::kStageBytes + Config::kXBytes;
    const std::uint32_t x = base + stage * Config::kStageBytes;
    Rows low_rows, high_rows;
    low_rows.begin(p, weights, weight_row, 0), high_rows.begin(p, weights, weight_row + 8, 0);
#pragma unroll
    for (int group = 0; group < Config::kKGroups; ++group) {
      low_rows.load(group), high_rows.load(group);
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t low[4], high[4], fragments[2][4];
        low_rows.dequantize(group, w, low), high_rows.dequantize(group, w, high);
        pack_a_fragments(low, high, fragments);
        wgmma_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t from = x + group * Config::kXGroupBytes + (2 * w + half) * 32;
          wgmma<T>(acc, fragments[half], smem_descriptor(from));
          if constexpr (kSecondN > 0) wgmma<T>(acc2, fragments[half], smem_descriptor(from + kFirstN * 128));
        }
        wgmma_commit_group();
        // The registers of the fragments before these are free. At a stage's end none is in flight: ptxas serialises
        // WGMMAs that are in flight across iterations of a loop.
        if (group == Config::kKGroups - 1 && w == 1) {
          wgmma_wait_group<0>();
        } else {
          wgmma_wait_group<1>();
        }
        if (group == 0 && w == 0) {
          if (step + kStages - 1 < steps) {
            const int next = (stage == 0 ? kStages - 1 : stage - 1) * Config::kStageBytes;
            loader.template load<M>(memory + next, base + next);
          }
          cp_async_commit();
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(memory);
  const auto put = [&](int row, int i, float sum) {
    sums[(row + i / 4 * 8 + 2 * t + (i & 1)) * Config::kAccStride + weight_row + (i >> 1 & 1) * 8] = sum;
  };
#pragma unroll
  for (int i = 0; i < kFirstN / 2; ++i) put(0, i, acc[i]);
#pragma unroll
  for (int i = 0; i < kSecondN / 2; ++i) put(kFirstN, i, acc2[i]);
  __syncthreads();
}

template <class Format, class T, bool GateUp>
__global__ void __launch_bounds__(MoeSm90Config<Format>::kThreads, 1)
    moe_gemm_sm90_kernel(typename Format::Moe p, int tiles_n) {
  using Config = MoeSm90Config<Format>;
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int tile_index = static_cast<int>(blockIdx.x) / tiles_n;
  const ExpertTile tile = p.tiles[tile_index];
  if (tile.rows == 0) return;
  const int n0 = (static_cast<int>(blockIdx.x) - tile_index * tiles_n) * (GateUp ? Config::kTileN / 2 : Config::kTileN);
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  unsigned char* const stages = memory + (base - start);
  MoeStageLoader<Format, Config, GateUp> loader(p, tile, n0);
  if (tile.rows <= 32) {
    mainloop<Format, T, 32, GateUp>(p, loader, stages, base);
  } else if (tile.rows <= 64) {
    mainloop<Format, T, 64, GateUp>(p, loader, stages, base);
  } else if (tile.rows <= 128) {
    mainloop<Format, T, 128, GateUp>(p, loader, stages, base);
  } else {
    mainloop<Format, T, 160, GateUp>(p, loader, stages, base);
  }
  const float* const sums = reinterpret_cast<const float*>(stages);
  if constexpr (GateUp) {
    epilogue_gate_up<Format, T, Config>(p, tile, n0, sums);
  } else {
    epilogue_down<Format, T, Config>(p, tile, n0, sums);
  }
}

template <class Format, class T, bool GateUp>
int launch_gemm_sm90(const typename Format::Moe& p, Stream stream) {
  return launch_moe_gemm<Format, MoeSm90Config<Format>, GateUp>(moe_gemm_sm90_kernel<Format, T, GateUp>, p, stream);
}

template <class Format, bool GateUp>
int moe_gemm_sm90(const typename Format::Moe& p, Stream stream) {
  if (!p.has_wgmma || p.tile_m != kMoeSm90TileM) return kNoKernel;
  if (p.dtype == DType::kFloat16) return launch_gemm_sm90<Format, __half, GateUp>(p, stream);
  return p.dtype == DType::kBFloat16 ? launch_gemm_sm90<Format, __nv_bfloat16, GateUp>(p, stream) : kNoKernel;
}

}  // namespace
}  // namespace untorch::kernels::cuda
