// The mainloop step of a warp of the W4A16 GEMV: one k block (128 k) from shared memory, mma.sync.m16n8k16.
//
// The weight is the A operand: two 8-column tiles are its 16 rows, and the four pairs of a word of each are the
// fragments of two k16 steps. x is the B operand, 8 rows of x a step (an M tile).
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

// Groups of a column in a k block, where partial sums are scaled by group.
template <class Format>
constexpr int groups_per_k_block() {
  if constexpr (Format::kScalesGroupSums) {
    return Format::kScaleRows;
  } else {
    return 1;
  }
}

// acc += weight · xᵀ for 16·NPairs columns and 8·MTiles rows. Accumulators 4·(MTiles·i + r) and the next of pair i and
// M tile r: column 16i + g with rows 8r + 2t and 8r + 2t + 1, then column 16i + 8 + g.
//
// words: the first 8-column tile's; 128 a tile. Wide: inner_k_tiles is 8, a lane's four words are one load; else
// lane_words are. scales: the stage's, of TileN columns; column: the first of them. x_at(r, j): this lane's address for
// ldmatrix, of M tile r and k 32j to 32j + 31.
template <class Format, class T, bool Wide, int NPairs, int MTiles, int TileN, class Address>
__device__ __forceinline__ void mma_k_block(const typename Format::Gemm& p, const std::uint32_t* words, int lane_words,
                                            const unsigned char* scales, int column, const Address& x_at,
                                            float (&acc)[NPairs * MTiles * 4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  std::uint32_t x[MTiles][4][4];
#pragma unroll
  for (int r = 0; r < MTiles; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_x4(x[r][j], x_at(r, j));
  }
  // d += two k16 steps of a word j, of 16 columns, with M tile r.
  const auto mma_word = [&](float(&d)[4], int r, int j, const std::uint32_t(&low)[4], const std::uint32_t(&high)[4]) {
    mma<T>(d, low[0], high[0], low[1], high[1], x[r][j][0], x[r][j][1]);
    mma<T>(d, low[2], high[2], low[3], high[3], x[r][j][2], x[r][j][3]);
  };
  // Σ x over each group, in the lane's accumulator layout: a matrix of ones times x.
  constexpr int kGroups = groups_per_k_block<Format>(), kWords = 4 / kGroups;
  float2 x_sums[kGroups][MTiles];
  if constexpr (Format::kScalesGroupSums) {
    constexpr std::uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    constexpr std::uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int r = 0; r < MTiles; ++r) {
        float sums[4] = {};
#pragma unroll
        for (int j = q * kWords; j < (q + 1) * kWords; ++j) mma_word(sums, r, j, kOnes, kOnes);
        x_sums[q][r] = float2{sums[0], sums[1]};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < NPairs; ++i) {
    std::uint32_t word[2][4];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const std::uint32_t* const tile = words + (2 * i + side) * 128;
      if constexpr (Wide) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + lane * 4);
        word[side][0] = v.x, word[side][1] = v.y, word[side][2] = v.z, word[side][3] = v.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[side][j] = tile[word_index(lane_words, j, lane)];
      }
    }
    std::uint32_t low[4], high[4];
    const int at = column + i * 16 + g;
    if constexpr (Format::kScalesGroupSums) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float group_sums[MTiles][4] = {};
#pragma unroll
        for (int j = q * kWords; j < (q + 1) * kWords; ++j) {
          Format::template dequantize_word<T>(word[0][j], low);
          Format::template dequantize_word<T>(word[1][j], high);
#pragma unroll
          for (int r = 0; r < MTiles; ++r) mma_word(group_sums[r], r, j, low, high);
        }
        const unsigned char* const scale_row = scales + q * TileN * 4;
        const GroupScale low_group = Format::template group_scale<T>(scale_row, at),
                         high_group = Format::template group_scale<T>(scale_row, at + 8);
#pragma unroll
        for (int r = 0; r < MTiles; ++r) {
          float* const to = acc + (i * MTiles + r) * 4;
          accumulate_group(to[0], to[1], group_sums[r][0], group_sums[r][1], low_group, x_sums[q][r]);
          accumulate_group(to[2], to[3], group_sums[r][2], group_sums[r][3], high_group, x_sums[q][r]);
        }
      }
    } else {
      using ColumnScales = typename Format::template ColumnScales<T, TileN, const std::uint32_t*>;
      const auto* const scale_words = reinterpret_cast<const std::uint32_t*>(scales);
      ColumnScales low_scales(p, scale_words, at), high_scales(p, scale_words, at + 8);
      float sums[MTiles][4];
#pragma unroll
      for (int r = 0; r < MTiles; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[r][v] = acc[(i * MTiles + r) * 4 + v];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low_scales.prepare(j), high_scales.prepare(j);
        low_scales.dequantize_word(j, word[0][j], low);
        high_scales.dequantize_word(j, word[1][j], high);
#pragma unroll
        for (int r = 0; r < MTiles; ++r) mma_word(sums[r], r, j, low, high);
      }
#pragma unroll
      for (int r = 0; r < MTiles; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) acc[(i * MTiles + r) * 4 + v] = sums[r][v];
      }
    }
  }
}

}  // namespace
}  // namespace untorch::kernels::cuda
