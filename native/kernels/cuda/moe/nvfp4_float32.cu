// NVFP4 MoE grouped GEMM in float32, without tensor cores: for correctness, not for speed.
//
// A warp has one output column and up to 8 rows (TileM 8) of one expert; a lane dequantizes a word of 8 k at a time,
// every 256 k, and a butterfly shuffle reduces the lanes in a fixed order. Bytes: 0.5625 a weight for every 8 rows; x
// from L1 and L2. Operations: 8 FMA a weight, and 8 loads of x from L1, which are the bound.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/moe/nvfp4_mainloop.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kTileM = 8;

__device__ __forceinline__ float half_bits(std::uint32_t bits) {
  const auto narrow_bits = static_cast<std::uint16_t>(bits);
  __half value;
  memcpy(&value, &narrow_bits, 2);
  return __half2float(value);
}
// The bits of E2M1, and of E4M3, as a float16's are the value times 2^-14, and 2^-8.
__device__ __forceinline__ float e2m1_value(std::uint32_t code) {
  return half_bits((code & 7) << 9 | (code & 8) << 12) * 16384.0f;
}
__device__ __forceinline__ float e4m3_scale(std::uint32_t bits) {
  return half_bits((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
}

// sums[row] += x[row] · w for one row of the weight: codes and block scales.
__device__ __forceinline__ void dot_weight_row(const std::uint8_t* codes, const std::uint8_t* scales, int k_end,
                                               const float* const (&x)[kTileM], int rows, float (&sums)[kTileM]) {
  for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < k_end; k += 256) {
    const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(codes + k / 2);
    const float scale = e4m3_scale(scales[k / 16]);
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] = e2m1_value(word >> 4 * i & 15) * scale;
#pragma unroll
    for (int r = 0; r < kTileM; ++r) {
      if (r >= rows) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] += x[r][k + i] * weight[i];
    }
  }
}

__device__ __forceinline__ float warp_reduce(float sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

template <bool GateUp>
__global__ void __launch_bounds__(kThreads) moe_gemm_float32_kernel(Nvfp4Moe p, int tiles_n) {
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
  const std::uint8_t *const codes = GateUp ? p.w13 : p.w2, *const scales = GateUp ? p.w13_scale : p.w2_scale;
  float sums[kTileM] = {}, ups[kTileM] = {};
  dot_weight_row(codes + weight_row * k / 2, scales + weight_row * k / 16, static_cast<int>(k), x, tile.rows, sums);
  if constexpr (GateUp) {
    const std::int64_t up = weight_row + columns;
    dot_weight_row(codes + up * k / 2, scales + up * k / 16, static_cast<int>(k), x, tile.rows, ups);
  }
  const float* const bias = GateUp ? p.w13_bias : p.w2_bias;
  const float bias_value = bias == nullptr ? 0.0f : bias[weight_row],
              up_bias = GateUp && bias != nullptr ? bias[weight_row + columns] : 0.0f;
  const float* const global = GateUp ? p.w13_global + (p.two_scales ? 2 : 1) * tile.expert : p.w2_global + tile.expert;
#pragma unroll
  for (int r = 0; r < kTileM; ++r) {
    if (r >= tile.rows) break;
    const float sum = warp_reduce(sums[r]) * global[0] + bias_value;
    const int position = tile.begin + r;
    if constexpr (GateUp) {
      const float up = warp_reduce(ups[r]) * global[p.two_scales ? 1 : 0] + up_bias;
      if (lane == 0) static_cast<float*>(p.act)[position * columns + column] = swiglu(p.swiglu, sum, up);
    } else if (lane == 0) {
      const int pair = p.sorted_pairs[position];
      p.pair_out[pair * columns + column] = sum * p.topk_weights[pair];
    }
  }
}

template <bool GateUp>
int moe_gemm_float32(const Nvfp4Moe& p, Stream stream) {
  const std::int64_t tiles_n = ((GateUp ? p.intermediate : p.k) + kWarps - 1) / kWarps;
  if (p.dtype != DType::kFloat32 || p.tile_m != kTileM || tiles_n * p.num_tiles > 0x7fffffff) return kNoKernel;
  moe_gemm_float32_kernel<GateUp>
      <<<static_cast<unsigned>(tiles_n * p.num_tiles), kThreads, 0, stream>>>(p, static_cast<int>(tiles_n));
  return cudaGetLastError();
}

}  // namespace

int nvfp4_moe_gate_up_float32(const Nvfp4Moe& p, Stream stream) { return moe_gemm_float32<true>(p, stream); }
int nvfp4_moe_down_float32(const Nvfp4Moe& p, Stream stream) { return moe_gemm_float32<false>(p, stream); }

}  // namespace untorch::kernels::cuda
