// Int4's `Format` parameters of the W4A16 kernels: how a stage's scales are loaded to shared memory, and dequantization
// with them.
//
// A Format has kScaleBytesPerColumn of a stage; a ScaleLoader (cp.async) or load_scales (TMA); and ColumnScales, a
// lane's scales of one column, or group_scale. `Words` is a pointer to shared memory, or SharedWords. A stage's scales
// are rows [group][column] of 4 bytes, scale and zero:
//
//   Int4GemvFormat    1 row (group >= 128), or 4 of 32 k      applied to partial sums of a group
//   Int4Sm80Format    a row for each group of the k block     applied to weights
//   Int4Sm90Format    1, 2 or 4 rows                          applied to weights, held in registers
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/w4a16/int4_fragments.cuh"
#include "kernels/cuda/w4a16/int4_heuristic.h"

namespace untorch::kernels::cuda {

// group = 1 << log2_group.
__device__ __forceinline__ int log2_group(const Int4Gemm& p) { return __ffs(static_cast<int>(p.group)) - 1; }

struct Int4ScaledWeights {
  using Gemm = Int4Gemm;
  static constexpr bool kHasGlobalScale = false, kScalesGroupSums = false;
};

// Codes are multiplied without scale and zero, which are applied to the partial sums of a group: decode_pairs.
struct Int4ScaledGroupSums {
  using Gemm = Int4Gemm;
  static constexpr bool kHasGlobalScale = false, kScalesGroupSums = true;

  template <class T>
  __device__ static __forceinline__ void dequantize_word(std::uint32_t word, std::uint32_t (&pairs)[4]) {
    decode_pairs<T>(word, pairs);
  }
  // Of a column, in the scale row of a group.
  template <class T>
  __device__ static __forceinline__ GroupScale group_scale(const unsigned char* scale_row, int column) {
    return make_group_scale<T>(reinterpret_cast<const std::uint32_t*>(scale_row)[column]);
  }
};

// For w4a16_gemv.cuh: a scale row for each 32 k, or one for all 128.
template <int ScaleRows>
struct Int4GemvFormat : Int4ScaledGroupSums {
  static constexpr int kScaleRows = ScaleRows, kScaleBytesPerColumn = 4 * ScaleRows,
                       kGemvSharedBytes = kInt4GemvSharedBytes;
  static constexpr int kGemvSharedBytesM16 = kInt4GemvSharedBytesM16;
  // With four scale rows, M = 1 and 2 are faster with TileM 4, whose warps have more columns: 4096 × 14336 14.4 µs
  // instead of 16.8, 14336 × 4096 14.0 instead of 16.1; 4096 × 4096 7.1 instead of 6.9.
  static constexpr int kMinTileM = ScaleRows == 4 ? 4 : 1;

  // cp.async by the lanes of a warp.
  template <int TileN>
  class ScaleLoader {
   public:
    __device__ __forceinline__ ScaleLoader(const Int4Gemm& p, std::int64_t n0, int columns)
        : lane_(static_cast<int>(threadIdx.x) % 32),
          columns_(columns),
          k_(static_cast<int>(p.k)),
          group_bits_(log2_group(p)),
          step_(p.n * 4),
          scales_(static_cast<const char*>(p.scales) + n0 * 4) {}

    __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
#pragma unroll
      for (int r = 0; r < ScaleRows; ++r) {
        const int k = k0 + r * (kW4A16BlockK / ScaleRows);
        const char* const from = scales_ + std::int64_t{k >> group_bits_} * step_ + lane_ * 4;
#pragma unroll
        for (int i = 0; i < (TileN + 31) / 32; ++i) {
          const int column = i * 32 + lane_;
          const bool inside = k < k_ && column < columns_;
          if (column < TileN) cp_async_4(to + (r * TileN + column) * 4, from + i * 128, inside ? 4 : 0);
        }
      }
    }

   private:
    int lane_, columns_, k_, group_bits_;
    std::int64_t step_;
    const char* scales_;
  };
};

// A scale row for each group that begins in the k block.
template <class T, int TileN, class Words>
class Int4SharedScales {
 public:
  __device__ __forceinline__ Int4SharedScales(const Int4Gemm& p, Words scales, int column)
      : scales_(scales), column_(column), group_bits_(log2_group(p)) {}
  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void dequantize_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    dequantize_pairs<T>(word, scale_pair<T>(scales_[(j * 32 >> group_bits_) * TileN + column_]), pairs);
  }

 private:
  Words scales_;
  int column_, group_bits_;
};

// A compile-time number of scale rows: groups of 128 / ScaleRows k, or longer ones where it is 1.
template <class T, int TileN, int ScaleRows>
class Int4RegisterScales {
 public:
  template <class Words>
  __device__ __forceinline__ Int4RegisterScales(const Int4Gemm&, Words scales, int column, int /*block*/) {
#pragma unroll
    for (int i = 0; i < ScaleRows; ++i) scales_and_zeros_[i] = scales[i * TileN + column];
  }
  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void dequantize_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    dequantize_pairs<T>(word, scale_pair<T>(scales_and_zeros_[j * ScaleRows / 4]), pairs);
  }

 private:
  std::uint32_t scales_and_zeros_[ScaleRows];
};

// For w4a16_gemm_sm80.cuh, 128 columns.
struct Int4Sm80Format : Int4ScaledWeights {
  static constexpr int kScaleBytesPerColumn = 16;
  template <class T, int TileN, class Words>
  using ColumnScales = Int4SharedScales<T, TileN, Words>;

  // cp.async by the first 128 threads of a CTA, 16 bytes each: warp i has scale row i.
  class ScaleLoader {
   public:
    __device__ __forceinline__ ScaleLoader(const Int4Gemm& p, int n0) : k_(static_cast<int>(p.k)) {
      const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
      group_bits_ = log2_group(p);
      const int k = warp << group_bits_;  // k of the k block before this group
      group_k_ = k < kW4A16BlockK && warp < 4 && lane * 4 < p.n - n0 ? k : k_;
      from_ = static_cast<const char*>(p.scales) + (n0 + lane * 4) * 4;
      step_ = p.n * 4;
    }

    __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
      const auto thread = static_cast<int>(threadIdx.x);
      if (thread < 128) {
        const int k = k0 + group_k_;
        cp_async_16(to + thread * 16, from_ + std::int64_t{k >> group_bits_} * step_, k < k_ ? 16 : 0);
      }
    }

   private:
    const char* from_;
    std::int64_t step_;
    int k_, group_k_, group_bits_;
  };
};

// For w4a16_gemm_sm90.cuh: TMA loads of the scale rows of a k block, or of the one of a longer group.
template <int ScaleRows>
struct Int4Sm90Format : Int4ScaledWeights {
  static constexpr int kScaleBytesPerColumn = 4 * ScaleRows;
  template <class T, int TileN, class Words>
  using ColumnScales = Int4RegisterScales<T, TileN, ScaleRows>;

  static TensorMapSpec scale_map_spec(const Int4Gemm& p, int columns) {
    return {.base = p.scales,
            .element_bytes = 4,
            .rows = p.k / p.group,
            .columns = p.n,
            .row_bytes = p.n * 4,
            .box_rows = ScaleRows,
            .box_columns = columns};
  }
  template <int TileN>
  __device__ __forceinline__ static int scale_index(const Int4Gemm&, int column) {
    return column;
  }
  template <int TileN>
  __device__ __forceinline__ static void load_scales(const Int4Gemm& p, const TensorMap& map, std::uint32_t to, int n0,
                                                     int k0, std::uint32_t mbarrier, std::uint64_t policy) {
    tma_load_2d(to, map, n0, k0 >> log2_group(p), mbarrier, policy);
  }
};

}  // namespace untorch::kernels::cuda
