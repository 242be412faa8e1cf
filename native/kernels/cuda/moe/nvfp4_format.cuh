// NVFP4's `Format` parameter of the MoE GEMMs: E2M1 bytes, row-major, with E4M3 block scales; a global scale in the
// epilogue.
//
// In a stage: the weight's bytes, [TileN] rows of 32 bytes for 64 k, units of 32 bytes XOR-swizzled by row; block
// scales, 4 bytes a row for 64 k.
#pragma once

#include "kernels/cuda/moe/moe_weight.cuh"
#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"

namespace untorch::kernels::cuda {

// The XOR swizzle of a weight row's units of 32 bytes.
template <int Units>
__device__ __forceinline__ int moe_swizzle(int weight_row) {
  return (Units == 2 ? weight_row >> 1 : weight_row) & (Units - 1);
}

// Dequantizes a word with a prepared scale: nibbles i and i + 4 to pairs[i].
template <class T>
__device__ __forceinline__ void dequantize_pairs(std::uint32_t word, std::uint32_t scale, std::uint32_t (&pairs)[4]) {
  using V = Nvfp4Values<T>;
  V::codes(word, pairs);
#pragma unroll
  for (int i = 0; i < 4; ++i) pairs[i] = V::product(pairs[i], scale);
}

struct Nvfp4MoeFormat {
  using Moe = Nvfp4Moe;
  static constexpr int kScaleBytes = 4;
  static constexpr bool kHasGlobalScale = true;

  template <bool GateUp>
  __host__ __device__ static std::int64_t weight_k(const Nvfp4Moe& p) {
    return GateUp ? p.k : p.intermediate;
  }

  template <class Config, bool GateUp>
  class WeightLoader {
    using Weight = MoeWeight<GateUp>;
    static constexpr int kRowChunks = 2 * Config::kKGroups, kRowStep = Config::kThreads / kRowChunks,
                         kStageK = Config::kKGroups * kMoeKGroup, kCodeCopies = Config::kTileN / kRowStep,
                         kScaleThreads = Config::kTileN * Config::kKGroups;
    static_assert(kCodeCopies <= 2 && kRowStep % 16 == 0 && kScaleThreads <= Config::kThreads);

   public:
    __device__ __forceinline__ WeightLoader(const Nvfp4Moe& p, const ExpertTile& tile, int n0, unsigned& has) {
      const int thread = static_cast<int>(threadIdx.x);
      const std::int64_t k = weight_k<GateUp>(p);
      whole_ = k % kMoeKGroup == 0 ? kStageK : static_cast<int>(k) + 1;  // otherwise scales are not aligned
      const std::int64_t matrix = tile.expert * Weight::num_rows(p) * k;
      const int tile_row = thread / kRowChunks, chunk = thread % kRowChunks;
      const std::int64_t row = Weight::weight_row(p, n0, tile_row);
      has = (row >= 0 ? kHasCodes : 0) | (Weight::weight_row(p, n0, tile_row + kRowStep) >= 0 ? 2 * kHasCodes : 0);
      codes_ = (GateUp ? p.w13 : p.w2) + (matrix + (row >= 0 ? row : 0) * k) / 2 + chunk * 16;
      row_step_bytes_ = static_cast<std::uint32_t>(k) / 2 * (kRowStep / (GateUp ? 2 : 1));
      codes_to_ = Config::kXBytes + tile_row * (Config::kKGroups * 32) +
                  ((chunk / 2 ^ moe_swizzle<Config::kKGroups>(tile_row)) * 2 + chunk % 2) * 16;
      const std::int64_t scale_row = thread < kScaleThreads ? Weight::weight_row(p, n0, thread / Config::kKGroups) : -1;
      has |= scale_row >= 0 ? kHasScales : 0;
      scales_ = (GateUp ? p.w13_scale : p.w2_scale) + (matrix + (scale_row >= 0 ? scale_row : 0) * k) / 16 +
                thread % Config::kKGroups * 4;
    }

    // From how many k on that are left a stage is whole.
    __device__ __forceinline__ int whole() const { return whole_; }

    __device__ __forceinline__ void load_whole(std::uint32_t to, unsigned has) const {
#pragma unroll
      for (int i = 0; i < kCodeCopies; ++i) {
        cp_async_16_l2_128(to + codes_to_ + i * (kRowStep * Config::kKGroups * 32), codes_ + i * row_step_bytes_,
                           has & kHasCodes << i ? 16 : 0);
      }
      if (kScaleThreads == Config::kThreads || threadIdx.x < kScaleThreads) {
        cp_async_4(to + Config::kXBytes + Config::kWeightBytes + threadIdx.x * 4, scales_, has & kHasScales ? 4 : 0);
      }
    }

    // Where k ends within the stage, or is no multiple of 64: weight rows are 8-byte aligned, scales not at all.
    __device__ __forceinline__ void load_partial(unsigned char* memory, std::uint32_t to, unsigned has,
                                                 int k_left) const {
      const int thread = static_cast<int>(threadIdx.x), left = k_left - thread % kRowChunks * 32;
#pragma unroll
      for (int i = 0; i < kCodeCopies; ++i) {
        const std::uint8_t* const from = codes_ + i * row_step_bytes_;
        const std::uint32_t at = to + codes_to_ + i * (kRowStep * Config::kKGroups * 32);
        cp_async_8(at, from, left > 0 && has & kHasCodes << i ? 8 : 0);
        cp_async_8(at + 8, from + 8, left > 16 && has & kHasCodes << i ? 8 : 0);
      }
      if (thread >= kScaleThreads) return;
      const int scales_left = has & kHasScales ? k_left / 16 - thread % Config::kKGroups * 4 : 0;
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i < scales_left) word |= std::uint32_t{scales_[i]} << 8 * i;
      }
      *reinterpret_cast<std::uint32_t*>(memory + Config::kXBytes + Config::kWeightBytes + thread * 4) = word;
    }

    __device__ __forceinline__ void advance() { codes_ += kStageK / 2, scales_ += kStageK / 16; }

   private:
    const std::uint8_t *codes_, *scales_;
    std::uint32_t row_step_bytes_;  // from a weight row to that of the second load
    int whole_, codes_to_;
  };

  // A lane's row g of 8, of the warp's 64-k groups in a stage.
  template <class T, class Config>
  class Rows {
   public:
    // weights: of the stage, scales behind them. row: in the tile. group: the warp's first.
    __device__ __forceinline__ void begin(const Nvfp4Moe&, const unsigned char* weights, int row, int group) {
      weights_ = weights, row_ = row, group_ = group;
    }

    // Loads what dequantize takes of the warp's group i.
    __device__ __forceinline__ void load(int i) {
      const int t = static_cast<int>(threadIdx.x) % 4, group = group_ + i;
      const unsigned selector = 0x4040u + t * 0x0101u;  // __byte_perm: byte t, twice, with zeros above
      words_ = *reinterpret_cast<const uint2*>(weights_ + row_ * (Config::kKGroups * 32) +
                                               (group ^ moe_swizzle<Config::kKGroups>(row_)) * 32 + t * 8);
      const std::uint32_t four = *reinterpret_cast<const std::uint32_t*>(weights_ + Config::kWeightBytes +
                                                                         (row_ * Config::kKGroups + group) * 4);
      scale_ = Nvfp4Values<T>::scale_pair_of(__byte_perm(four, 0, selector));
    }

    // Word 0 or 1 of that group, four pairs.
    __device__ __forceinline__ void dequantize(int /*i*/, int word, std::uint32_t (&pairs)[4]) const {
      dequantize_pairs<T>(word == 0 ? words_.x : words_.y, scale_, pairs);
    }

   private:
    const unsigned char* weights_;
    int row_, group_;
    uint2 words_;
    std::uint32_t scale_;
  };

  // Of the gate's and the up's accumulators of an expert.
  template <class T>
  __device__ static __forceinline__ float2 gate_up_scales(const Nvfp4Moe& p, int expert) {
    const float* const global = p.w13_global + (p.two_scales ? 2 : 1) * expert;
    return make_float2(global[0] * Nvfp4Values<T>::kUnshift, global[p.two_scales ? 1 : 0] * Nvfp4Values<T>::kUnshift);
  }
  template <class T>
  __device__ static __forceinline__ float down_scale(const Nvfp4Moe& p, int expert) {
    return p.w2_global[expert] * Nvfp4Values<T>::kUnshift;
  }

  // The global scales of sums in float32.
  __device__ static __forceinline__ float2 float32_scales(const Nvfp4Moe& p, bool gate_up, int expert) {
    const float* const global = gate_up ? p.w13_global + (p.two_scales ? 2 : 1) * expert : p.w2_global + expert;
    return make_float2(global[0], gate_up && p.two_scales ? global[1] : global[0]);
  }

  // sums[row] += x[row] · w for one row of the weight, by a lane of a warp.
  template <bool GateUp, int Rows>
  __device__ static __forceinline__ void dot_weight_row(const Nvfp4Moe& p, std::int64_t weight_row,
                                                        const float* const (&x)[Rows], int rows, float (&sums)[Rows]) {
    const int k_end = static_cast<int>(weight_k<GateUp>(p));
    const std::uint8_t* const codes = (GateUp ? p.w13 : p.w2) + weight_row * k_end / 2;
    const std::uint8_t* const scales = (GateUp ? p.w13_scale : p.w2_scale) + weight_row * k_end / 16;
    for (int k = static_cast<int>(threadIdx.x) % 32 * 8; k < k_end; k += 256) {
      const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(codes + k / 2);
      const float scale = e4m3_scale(scales[k / 16]);
      float weight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) weight[i] = e2m1_value(word >> 4 * i & 15) * scale;
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (r >= rows) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[r] += x[r][k + i] * weight[i];
      }
    }
  }

 private:
  __device__ static __forceinline__ float half_bits(std::uint32_t bits) {
    const auto narrow_bits = static_cast<std::uint16_t>(bits);
    __half value;
    memcpy(&value, &narrow_bits, 2);
    return __half2float(value);
  }
  // The bits of E2M1, and of E4M3, as a float16's are the value times 2^-14, and 2^-8.
  __device__ static __forceinline__ float e2m1_value(std::uint32_t code) {
    return half_bits((code & 7) << 9 | (code & 8) << 12) * 16384.0f;
  }
  __device__ static __forceinline__ float e4m3_scale(std::uint32_t bits) {
    return half_bits((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f;
  }
};

}  // namespace untorch::kernels::cuda
