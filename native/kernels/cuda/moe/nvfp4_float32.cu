// The products of a mixture of experts for float32: right rather than fast.
//
// Layout: a warp has a column and up to 8 rows of one expert; its lanes take turns along k, eight k's of one word each,
// and their sums meet in an order that does not vary. Bytes: 0.5625 a weight for every 8 rows, x from the caches.
// Operations: 8 multiply-adds a weight and 8 loads of x from the first-level cache, which are the bound.
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/moe/nvfp4_mainloop.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 8;

__device__ __forceinline__ float half_bits(std::uint32_t bits) {
  const auto narrow_bits = static_cast<std::uint16_t>(bits);
  __half value;
  memcpy(&value, &narrow_bits, 2);
  return __half2float(value);
}
// The bits of a code, and those of E4M3, are a float16's, smaller by 2^14 and 2^8.
__device__ __forceinline__ float value_of(std::uint32_t code) {
  return half_bits((code & 7) << 9 | (code & 8) << 12) * 16384.0f;
}
__device__ __forceinline__ float scale_of(std::uint32_t bits) {
  return half_bits((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
}

// sums[row] += x[row] · line, for one line of codes and its scales.
__device__ __forceinline__ void add_line(const std::uint8_t* codes, const std::uint8_t* scales, int depth,
                                         const float* const (&x)[kRows], int rows, float (&sums)[kRows]) {
  for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < depth; k += 256) {
    const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(codes + k / 2);
    const float scale = scale_of(scales[k / 16]);
    float weight[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) weight[i] = value_of(word >> 4 * i & 15) * scale;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows) continue;
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[r] += x[r][k + i] * weight[i];
    }
  }
}

__device__ __forceinline__ float over_warp(float sum) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

template <bool First>
__global__ void __launch_bounds__(kThreads) multiply_rows(Nvfp4Moe p, int tiles) {
  const int at = static_cast<int>(blockIdx.x) / tiles, lane = static_cast<int>(threadIdx.x) % 32;
  const MoeBlock block = p.list[at];
  const std::int64_t column =
      std::int64_t{static_cast<int>(blockIdx.x) - at * tiles} * kWarps + static_cast<int>(threadIdx.x) / 32;
  const std::int64_t depth = First ? p.k : p.width, columns = First ? p.width : p.k;
  if (block.rows == 0 || column >= columns) return;
  const float* x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int place = block.begin + (r < block.rows ? r : 0);
    x[r] = First ? static_cast<const float*>(p.x) + p.sorted[place] / p.top_k * p.x_row
                 : static_cast<const float*>(p.act) + place * depth;
  }
  const std::int64_t line = block.expert * (First ? 2 * columns : columns) + column;
  const std::uint8_t *const codes = First ? p.w13 : p.w2, *const scales = First ? p.w13_scale : p.w2_scale;
  float sums[kRows] = {}, ups[kRows] = {};
  add_line(codes + line * depth / 2, scales + line * depth / 16, static_cast<int>(depth), x, block.rows, sums);
  if constexpr (First) {
    const std::int64_t up = line + columns;
    add_line(codes + up * depth / 2, scales + up * depth / 16, static_cast<int>(depth), x, block.rows, ups);
  }
  const float* const bias = First ? p.w13_bias : p.w2_bias;
  const float added = bias == nullptr ? 0.0f : bias[line],
              added_up = First && bias != nullptr ? bias[line + columns] : 0.0f;
  const float* const global = First ? p.w13_global + (p.two_scales ? 2 : 1) * block.expert : p.w2_global + block.expert;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= block.rows) break;
    const float sum = over_warp(sums[r]) * global[0] + added;
    const int place = block.begin + r;
    if constexpr (First) {
      const float up = over_warp(ups[r]) * global[p.two_scales ? 1 : 0] + added_up;
      if (lane == 0) static_cast<float*>(p.act)[place * columns + column] = gated(p.swiglu, sum, up);
    } else if (lane == 0) {
      const int pair = p.sorted[place];
      p.results[pair * columns + column] = sum * p.topk_weights[pair];
    }
  }
}

template <bool First>
int float_product(const Nvfp4Moe& p, Stream stream) {
  const std::int64_t tiles = ((First ? p.width : p.k) + kWarps - 1) / kWarps;
  if (p.dtype != DType::kFloat32 || p.rows != kRows || tiles * p.blocks > 0x7fffffff) return kNoKernel;
  multiply_rows<First><<<static_cast<unsigned>(tiles * p.blocks), kThreads, 0, stream>>>(p, static_cast<int>(tiles));
  return cudaGetLastError();
}

}  // namespace

int nvfp4_moe_gate_up_float(const Nvfp4Moe& p, Stream stream) { return float_product<true>(p, stream); }
int nvfp4_moe_down_float(const Nvfp4Moe& p, Stream stream) { return float_product<false>(p, stream); }

}  // namespace untorch::kernels::cuda
