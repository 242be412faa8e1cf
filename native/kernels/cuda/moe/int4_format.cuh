// Int4's `Format` parameter of the MoE GEMMs: tiles of 8 rows × 128 k in the order of the mma fragments, and a scale
// and a zero for each group of k, applied to weights in registers.
//
// In a stage: the weight, [TileN / 8][kKGroups / 2] tiles of 512 bytes as packed, a lane's four words contiguous, so
// that neither loads nor reads are swizzled; scales, a row of [TileN] 4-byte pairs for each group of k in the stage,
// one for a longer group. In memory a tile's 512 bytes follow those of the k before it: loads are contiguous along K.
#pragma once

#include "kernels/cuda/moe/int4_moe.h"
#include "kernels/cuda/moe/moe_weight.cuh"
#include "kernels/cuda/w4a16/int4_fragments.cuh"

namespace untorch::kernels::cuda {

struct Int4MoeFormat {
  using Moe = Int4Moe;
  static constexpr int kScaleBytes = 8;  // groups of 32; longer ones leave the end of a stage unused
  static constexpr bool kHasGlobalScale = false;

  template <bool GateUp>
  __host__ __device__ static std::int64_t weight_k(const Int4Moe& p) {
    return GateUp ? p.w13_k : p.w2_k;
  }
  // group = 1 << log2_group.
  __device__ static __forceinline__ int log2_group(const Int4Moe& p) { return __ffs(static_cast<int>(p.group)) - 1; }

  template <class Config, bool GateUp>
  class WeightLoader {
    using Weight = MoeWeight<GateUp>;
    static constexpr int kStageK = Config::kKGroups * kMoeKGroup, kKBlocks = kStageK / kW4A16BlockK,
                         kCopies = Config::kWeightBytes / 16 / Config::kThreads,
                         kTileStep = Config::kThreads / 32 / kKBlocks,  // 8-row tiles between a thread's copies
        kScaleChunks = Config::kTileN / 4;                              // of 16 bytes, in a scale row
    static_assert(kCopies == 2 && kTileStep % 2 == 0 && Config::kWeightBytes % (16 * Config::kThreads) == 0);
    static_assert(kScaleChunks * (kStageK / 32) <= Config::kThreads);

   public:
    __device__ __forceinline__ WeightLoader(const Int4Moe& p, const ExpertTile& tile, int n0, unsigned& has) {
      const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
      const int weight_tile = warp / kKBlocks, block = warp % kKBlocks;
      const std::int64_t k = weight_k<GateUp>(p), first = tile.expert * Weight::num_rows(p);
      const std::int64_t row = Weight::weight_row(p, n0, weight_tile * 8);
      has = (row >= 0 ? kHasCodes : 0) |
            (Weight::weight_row(p, n0, (weight_tile + kTileStep) * 8) >= 0 ? 2 * kHasCodes : 0);
      weight_ = static_cast<const char*>(GateUp ? p.w13 : p.w2) + (first + (row >= 0 ? row : 0)) / 8 * k * 4 +
                block * 512 + lane * 16;
      tile_step_bytes_ = static_cast<std::uint32_t>(k) * 4 * (kTileStep / (GateUp ? 2 : 1));
      block_k_ = block * kW4A16BlockK;
      group_bits_ = log2_group(p);
      const int scale_row = thread / kScaleChunks, chunk = thread % kScaleChunks;
      const std::int64_t scale_column = Weight::weight_row(p, n0, chunk * 4);
      const int scale_rows = kStageK >> group_bits_ > 1 ? kStageK >> group_bits_ : 1;
      has |= scale_row < scale_rows && scale_column >= 0 ? kHasScales : 0;
      scales_ = static_cast<const char*>(GateUp ? p.w13_scales : p.w2_scales) +
                (first + (scale_column >= 0 ? scale_column : 0)) * 4;
      scale_row_bytes_ = p.experts * Weight::num_rows(p) * 4;
      scale_k_ = scale_row << group_bits_;
    }

    __device__ __forceinline__ int whole() const { return kStageK; }

    __device__ __forceinline__ void load_whole(std::uint32_t to, unsigned has) const {
      load_weight(to, has);
      load_scales(to, has & kHasScales);
    }

    // Where k ends within the stage, after an odd number of k blocks.
    __device__ __forceinline__ void load_partial(unsigned char*, std::uint32_t to, unsigned has, int k_left) const {
      load_weight(to, block_k_ < k_left ? has : 0);
      load_scales(to, scale_k_ - first_k_ < k_left ? has & kHasScales : 0);
    }

    __device__ __forceinline__ void advance() { weight_ += kStageK * 4, scale_k_ += kStageK, first_k_ += kStageK; }

   private:
    __device__ __forceinline__ void load_weight(std::uint32_t to, unsigned has) const {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        cp_async_16_l2_128(to + Config::kXBytes + (i * Config::kThreads + threadIdx.x) * 16,
                           weight_ + i * tile_step_bytes_, has & kHasCodes << i ? 16 : 0);
      }
    }
    __device__ __forceinline__ void load_scales(std::uint32_t to, unsigned has) const {
      if (threadIdx.x < kScaleChunks * (kStageK / 32)) {
        cp_async_16(to + Config::kXBytes + Config::kWeightBytes + threadIdx.x * 16,
                    scales_ + (scale_k_ >> group_bits_) * scale_row_bytes_, has != 0 ? 16 : 0);
      }
    }

    const char *weight_, *scales_;
    std::int64_t scale_row_bytes_;
    std::uint32_t tile_step_bytes_;  // from an 8-row tile to that of the second load
    int block_k_;                    // of the stage's k, where the thread's k block begins
    int scale_k_, first_k_ = 0;      // k of the thread's scale row, and of the stage
    int group_bits_;
  };

  // A lane's row g of 8, of the warp's 64-k groups in a stage.
  template <class T, class Config>
  class Rows {
    // All of a k block, or half of one.
    static constexpr int kGroups = Config::kKGroups / Config::kWarpSplitK;
    static_assert(kGroups == 1 || kGroups == 2);

   public:
    // weights: of the stage, scales behind them. row: in the tile. group: the warp's first.
    __device__ __forceinline__ void begin(const Int4Moe& p, const unsigned char* weights, int row, int group) {
      const int lane = static_cast<int>(threadIdx.x) % 32;
      const unsigned char* const from =
          weights + (row / 8 * (Config::kKGroups / 2) + group / 2) * 512 + lane * 16 + group % 2 * 8;
      if constexpr (kGroups == 2) {
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words_[0] = v.x, words_[1] = v.y, words_[2] = v.z, words_[3] = v.w;
      } else {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words_[0] = v.x, words_[1] = v.y;
      }
      first_word_ = group * 2, group_bits_ = log2_group(p) - 5;
      // A group that is longer than the stage has one row.
      scales_ = reinterpret_cast<const std::uint32_t*>(weights + Config::kWeightBytes) + row;
    }

    __device__ __forceinline__ void load(int i) {
#pragma unroll
      for (int w = 0; w < 2; ++w) scale_[w] = scales_[((first_word_ + 2 * i + w) >> group_bits_) * Config::kTileN];
    }

    __device__ __forceinline__ void dequantize(int i, int word, std::uint32_t (&pairs)[4]) const {
      dequantize_pairs<T>(words_[2 * i + word], scale_pair<T>(scale_[word]), pairs);
    }

   private:
    const std::uint32_t* scales_;
    std::uint32_t words_[2 * kGroups], scale_[2];
    int group_bits_, first_word_;
  };

  // sums[row] += x[row] · w for one row of the weight, by a lane of a warp: one of the 16 words that a row has of a k
  // block, in every second k block.
  template <bool GateUp, int Rows>
  __device__ static __forceinline__ void dot_weight_row(const Int4Moe& p, std::int64_t weight_row,
                                                        const float* const (&x)[Rows], int rows, float (&sums)[Rows]) {
    const int k_end = static_cast<int>(weight_k<GateUp>(p)), width = static_cast<int>(GateUp ? p.k : p.intermediate);
    const int lane = static_cast<int>(threadIdx.x) % 32, place = lane % 16, bits = log2_group(p);
    const std::int64_t num_rows = p.experts * MoeWeight<GateUp>::num_rows(p);
    const auto* const words =
        static_cast<const std::uint32_t*>(GateUp ? p.w13 : p.w2) + weight_row / 8 * k_end + weight_row % 8 * 16 + place;
    const auto* const scales = static_cast<const float2*>(GateUp ? p.w13_scales : p.w2_scales) + weight_row;
    for (int block_k = lane / 16 * kW4A16BlockK; block_k < k_end; block_k += 2 * kW4A16BlockK) {
      const std::uint32_t word = words[block_k];
      const int word_k = block_k + place % 4 * 32;
      const float2 scale = scales[std::int64_t{word_k >> bits} * num_rows];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        if (word_k + 8 * pair >= width) break;
        const int k = word_k + 8 * pair + place / 4 * 2;
        const auto weight = [&](int nibble) {
          return fmaf(static_cast<float>(static_cast<int>(word >> (4 * nibble) & 15u) - 8), scale.x, scale.y);
        };
        const float even = weight(pair), odd = weight(pair + 4);
#pragma unroll
        for (int r = 0; r < Rows; ++r) {
          if (r < rows) sums[r] += x[r][k] * even + x[r][k + 1] * odd;
        }
      }
    }
  }
};

}  // namespace untorch::kernels::cuda
