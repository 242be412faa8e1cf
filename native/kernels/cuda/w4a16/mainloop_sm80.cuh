// What a warp does with a block of 128 k's of packed weights in shared memory, by mma.sync.
//
// Two tiles of 8 columns are the rows of the matrix instruction's first operand: of a word of either, the four pairs
// are its four registers for 16 k's and again for the next 16. x's rows are its second operand's columns, 8 a turn.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {
namespace {

// Groups of a column in a block, where sums are by group.
template <class Format>
constexpr int lines_of() {
  if constexpr (Format::kByGroup) {
    return Format::kLines;
  } else {
    return 1;
  }
}

// acc += the products of 16·Pairs columns with 8·Turns rows: of pair i and turn r, in 4·(Turns·i + r) and the next, the
// sums of column 16 i + g with rows 8 r + 2 t and the next, then those of column 16 i + 8 + g.
//
// words: of the first of the tiles, which have 128 each. Wide: a lane's four lie together, inner_k_tiles is 8; else
// lane_words do. scales: the stage's, which are those of Cols columns; column: the first one there. x_at(r, j): where
// this lane's row of turn r has the 16 bytes lane / 8 of k's 32 j and following, as ldmatrix takes them.
template <class Format, class T, bool Wide, int Pairs, int Turns, int Cols, class Address>
__device__ __forceinline__ void multiply_block(const typename Format::Gemm& p, const std::uint32_t* words,
                                               int lane_words, const unsigned char* scales, int column,
                                               const Address& x_at, float (&acc)[Pairs * Turns * 4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
  std::uint32_t x[Turns][4][4];
#pragma unroll
  for (int r = 0; r < Turns; ++r) {
#pragma unroll
    for (int j = 0; j < 4; ++j) load_matrices(x[r][j], x_at(r, j));
  }
  // d += a word's two tiles of 16 columns, times turn r of x's rows.
  const auto multiply = [&](float(&d)[4], int r, int j, const std::uint32_t(&low)[4], const std::uint32_t(&high)[4]) {
    mma<T>(d, low[0], high[0], low[1], high[1], x[r][j][0], x[r][j][1]);
    mma<T>(d, low[2], high[2], low[3], high[3], x[r][j][2], x[r][j][3]);
  };
  // The sums of x's rows over a group, where a lane has those of its columns: a matrix of ones times x.
  constexpr int kGroups = lines_of<Format>(), kWords = 4 / kGroups;
  float2 x_sums[kGroups][Turns];
  if constexpr (Format::kByGroup) {
    constexpr std::uint32_t kOne = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    constexpr std::uint32_t kOnes[4] = {kOne, kOne, kOne, kOne};
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int r = 0; r < Turns; ++r) {
        float sums[4] = {};
#pragma unroll
        for (int j = q * kWords; j < (q + 1) * kWords; ++j) multiply(sums, r, j, kOnes, kOnes);
        x_sums[q][r] = float2{sums[0], sums[1]};
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    std::uint32_t word[2][4];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
      const std::uint32_t* const tile = words + (2 * i + side) * 128;
      if constexpr (Wide) {
        const uint4 v = *reinterpret_cast<const uint4*>(tile + lane * 4);
        word[side][0] = v.x, word[side][1] = v.y, word[side][2] = v.z, word[side][3] = v.w;
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) word[side][j] = tile[word_at(lane_words, j, lane)];
      }
    }
    std::uint32_t low[4], high[4];
    const int at = column + i * 16 + g;
    if constexpr (Format::kByGroup) {
#pragma unroll
      for (int q = 0; q < kGroups; ++q) {
        float of_group[Turns][4] = {};
#pragma unroll
        for (int j = q * kWords; j < (q + 1) * kWords; ++j) {
          Format::template unpack_word<T>(word[0][j], low);
          Format::template unpack_word<T>(word[1][j], high);
#pragma unroll
          for (int r = 0; r < Turns; ++r) multiply(of_group[r], r, j, low, high);
        }
        const unsigned char* const line = scales + q * Cols * 4;
        const GroupFactors of_low = Format::template factors<T>(line, at),
                           of_high = Format::template factors<T>(line, at + 8);
#pragma unroll
        for (int r = 0; r < Turns; ++r) {
          float* const to = acc + (i * Turns + r) * 4;
          add_group(to[0], to[1], of_group[r][0], of_group[r][1], of_low, x_sums[q][r]);
          add_group(to[2], to[3], of_group[r][2], of_group[r][3], of_high, x_sums[q][r]);
        }
      }
    } else {
      using Column = typename Format::template Column<T, Cols, const std::uint32_t*>;
      const auto* const scale_words = reinterpret_cast<const std::uint32_t*>(scales);
      Column low_column(p, scale_words, at), high_column(p, scale_words, at + 8);
      float sums[Turns][4];
#pragma unroll
      for (int r = 0; r < Turns; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums[r][v] = acc[(i * Turns + r) * 4 + v];
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        low_column.prepare(j), high_column.prepare(j);
        low_column.unpack_word(j, word[0][j], low);
        high_column.unpack_word(j, word[1][j], high);
#pragma unroll
        for (int r = 0; r < Turns; ++r) multiply(sums[r], r, j, low, high);
      }
#pragma unroll
      for (int r = 0; r < Turns; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) acc[(i * Turns + r) * 4 + v] = sums[r][v];
      }
    }
  }
}

}  // namespace
}  // namespace untorch::kernels::cuda
