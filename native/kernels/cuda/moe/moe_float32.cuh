// MoE grouped GEMM in float32, without tensor cores: for correctness, not for speed.
//
// A warp has one output column and up to 8 rows (TileM 8) of one expert; a lane dequantizes a word of 8 k at a time,
// every 256 k, as `Format` does, and a butterfly shuffle reduces the lanes in a fixed order. Bytes: a weight's for
// every 8 rows; x from L1 and L2. Operations: 8 FMA a weight, and 8 loads of x from L1, which are the bound.
#pragma once

#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/moe/moe_weight.cuh"
#include "kernels/cuda/moe/swiglu.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTileM = 8;

__device__ __forceinline__ float warp_reduce(float sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

template <class Format, bool GateUp>
__global__ void __launch_bounds__(kThreads) moe_gemm_float32_kernel(typename Format::Moe p, int tiles_n) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const int tile_index = static_cast<int>(blockIdx.x) / tiles_n, lane = static_cast<int>(threadIdx.x) % 32;
  const ExpertTile tile = p.tiles[tile_index];
  const std::int64_t column =
      std::int64_t{static_cast<int>(blockIdx.x) - tile_index * tiles_n} * kWarps + static_cast<int>(threadIdx.x) / 32;
  const std::int64_t k = GateUp ? p.k : p.intermediate, columns = GateUp ? p.intermediate : p.k;
  if (tile.rows == 0 || column >= columns) return;
  const float* x[kTileM];
#pragma unroll
  for (int r = 0; r < kTileM; ++r) {
    const int position = tile.begin + (r < tile.rows ? r : 0);
    x[r] = GateUp ? static_cast<const float*>(p.x) + p.sorted_pairs[position] / p.top_k * p.x_stride
                  : static_cast<const float*>(p.act) + position * k;
  }
  const std::int64_t weight_row = tile.expert * (GateUp ? 2 * columns : columns) + column;
  float sums[kTileM] = {}, ups[kTileM] = {};
  Format::template dot_weight_row<GateUp>(p, weight_row, x, tile.rows, sums);
  if constexpr (GateUp) Format::template dot_weight_row<GateUp>(p, weight_row + columns, x, tile.rows, ups);
  const float* const bias = GateUp ? p.w13_bias : p.w2_bias;
  const float bias_value = bias == nullptr ? 0.0f : bias[weight_row],
              up_bias = GateUp && bias != nullptr ? bias[weight_row + columns] : 0.0f;
  float2 scales = make_float2(1.0f, 1.0f);
  if constexpr (Format::kHasGlobalScale) scales = Format::float32_scales(p, GateUp, tile.expert);
#pragma unroll
  for (int r = 0; r < kTileM; ++r) {
    if (r >= tile.rows) break;
    const float sum = warp_reduce(sums[r]) * scales.x + bias_value;
    const int position = tile.begin + r;
    if constexpr (GateUp) {
      const float up = warp_reduce(ups[r]) * scales.y + up_bias;
      if (lane == 0) static_cast<float*>(p.act)[position * columns + column] = swiglu(p.swiglu, sum, up);
    } else if (lane == 0) {
      const int pair = p.sorted_pairs[position];
      p.pair_out[pair * columns + column] = sum * p.topk_weights[pair];
    }
  }
}

template <class Format, bool GateUp>
int moe_gemm_float32(const typename Format::Moe& p, Stream stream) {
  const std::int64_t tiles_n = ((GateUp ? p.intermediate : p.k) + kWarps - 1) / kWarps;
  if (p.dtype != DType::kFloat32 || p.tile_m != kTileM || tiles_n * p.num_tiles > 0x7fffffff) return kNoKernel;
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(tiles_n * p.num_tiles)), how.threads = kThreads, how.pdl = p.pdl;
  return launch_kernel(moe_gemm_float32_kernel<Format, GateUp>, how, stream, p, static_cast<int>(tiles_n));
}

}  // namespace
}  // namespace untorch::kernels::cuda
