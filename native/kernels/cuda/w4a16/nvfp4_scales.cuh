// NVFP4's `Format` parameters of the W4A16 kernels, as int4_scales.cuh has int4's: loads of block scales, and
// dequantization with them. The global scale is applied to accumulators.
//
// A column has 8 E4M3 scales for a k block (128 k). cp.async loads 8 bytes a column: a quarter of a sector, of which L1
// keeps the rest for the next k blocks. TMA loads those of two k blocks (Nvfp4Sm90Format).
#pragma once

#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"
#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {

// A lane's scales of a column. The four lanes of a column prepare two of its eight each and exchange them by shuffles:
// the whole warp calls it.
template <class T>
class Nvfp4ColumnScales {
 public:
  template <class Words>
  __device__ __forceinline__ Nvfp4ColumnScales(const Nvfp4Gemm&, Words scales, int column)
      : Nvfp4ColumnScales(scales, 2 * column) {}

 protected:
  // first: the word at which the column's scales begin.
  template <class Words>
  __device__ __forceinline__ Nvfp4ColumnScales(Words scales, int first) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    // The first 16 k of two words, or the other 16: every second byte of four.
    const std::uint32_t four = scales[first + t / 2];
    own_ = Values::scale_pair_of(four >> (t % 2 * 8));
  }

 public:
  // Before word j; an even one gets the four scales of this and the next.
  __device__ __forceinline__ void prepare(int j) {
    if (j % 2 != 0) return;
    first_ = __shfl_sync(0xffffffffu, own_, j, 4), second_ = __shfl_sync(0xffffffffu, own_, j + 1, 4);
  }
  __device__ __forceinline__ void dequantize_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    Values::codes(word, pairs);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const std::uint32_t scales = p < 2 ? first_ : second_;
      pairs[p] = j % 2 == 0 ? Values::times_lower(pairs[p], scales) : Values::times_upper(pairs[p], scales);
    }
  }

 private:
  using Values = Nvfp4Values<T>;

  std::uint32_t own_;
  std::uint32_t first_ = 0, second_ = 0;  // of the first 16 k of two words, and of the other 16
};

struct Nvfp4Format {
  using Gemm = Nvfp4Gemm;
  static constexpr bool kHasGlobalScale = true, kScalesGroupSums = false;
  static constexpr int kScaleBytesPerColumn = 8;
  template <class T, int TileN, class Words>
  using ColumnScales = Nvfp4ColumnScales<T>;

  // The factor of a column's accumulators; the column may be out of bounds.
  template <class T>
  __device__ __forceinline__ static float global_scale(const Nvfp4Gemm& p, std::int64_t column) {
    const std::int64_t at = !p.row_scales ? 0 : column < p.n ? column : p.n - 1;
    return p.global_scales[at] * Nvfp4Values<T>::kUnshift;
  }
};

// cp.async by `Threads` threads, of which this is `thread`, for TileN columns, of which `columns` are in bounds.
template <int TileN, int Threads>
class Nvfp4ScaleLoader {
 public:
  __device__ __forceinline__ Nvfp4ScaleLoader(const Nvfp4Gemm& p, std::int64_t n0, int columns, int thread)
      : thread_(thread),
        columns_(columns),
        k_(static_cast<int>(p.k)),
        step_(p.k / 16 * Threads),
        from_(static_cast<const char*>(p.block_scales) + (n0 + thread) * (p.k / 16)) {}

  __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
    const char* from = from_ + k0 / 16;
#pragma unroll
    for (int i = 0; i < (TileN + Threads - 1) / Threads; ++i, from += step_) {
      const int column = i * Threads + thread_;
      if (column < TileN) cp_async_8(to + column * 8, from, k0 < k_ && column < columns_ ? 8 : 0);
    }
  }

 private:
  int thread_, columns_, k_;
  std::int64_t step_;
  const char* from_;
};

// For w4a16_gemv.cuh.
struct Nvfp4GemvFormat : Nvfp4Format {
  static constexpr int kGemvSharedBytes = kNvfp4GemvSharedBytes, kGemvSharedBytesM16 = kNvfp4GemvSharedBytesM16;
  static constexpr int kMinTileM = 1;

  template <int TileN>
  class ScaleLoader : public Nvfp4ScaleLoader<TileN, 32> {
   public:
    __device__ __forceinline__ ScaleLoader(const Nvfp4Gemm& p, std::int64_t n0, int columns)
        : Nvfp4ScaleLoader<TileN, 32>(p, n0, columns, static_cast<int>(threadIdx.x) % 32) {}
  };
};

// For w4a16_gemm_sm80.cuh.
struct Nvfp4Sm80Format : Nvfp4Format {
  class ScaleLoader : public Nvfp4ScaleLoader<128, 256> {
   public:
    __device__ __forceinline__ ScaleLoader(const Nvfp4Gemm& p, int n0)
        : Nvfp4ScaleLoader<128, 256>(p, n0, static_cast<int>(p.n - n0), static_cast<int>(threadIdx.x)) {}
  };
};

// For w4a16_gemm_sm90.cuh. A TMA box is a multiple of 16 bytes wide and begins at one: a stage has the scales of two k
// blocks, 16 bytes a column. The row stride must be a multiple of 16 bytes as well. Where K is an odd number of k
// blocks every other row is at one: the tensor map then has two columns of the weight in a row, and even and odd
// columns are two loads.
struct Nvfp4Sm90Format : Nvfp4Format {
  static constexpr int kScaleBytesPerColumn = 16;

  __host__ __device__ static bool interleaves_columns(const Nvfp4Gemm& p) { return p.k / kW4A16BlockK % 2 != 0; }
  static TensorMapSpec scale_map_spec(const Nvfp4Gemm& p, int columns) {
    const int columns_per_row = interleaves_columns(p) ? 2 : 1;
    return {.base = p.block_scales,
            .element_bytes = 1,
            .rows = p.n / columns_per_row,
            .columns = p.k / 16 * columns_per_row,
            .row_bytes = p.k / 16 * columns_per_row,
            .box_rows = columns / columns_per_row,
            .box_columns = kScaleBytesPerColumn};
  }
  template <int TileN>
  __device__ __forceinline__ static void load_scales(const Nvfp4Gemm& p, const TensorMap& map, std::uint32_t to, int n0,
                                                     int k0, std::uint32_t mbarrier, std::uint64_t /*policy*/) {
    // A sector has the scales of four k blocks: evict_normal.
    const auto from = [](int k) { return k / (2 * kW4A16BlockK) * kScaleBytesPerColumn; };
    if (!interleaves_columns(p)) {
      tma_load_2d(to, map, from(k0), n0, mbarrier);
    } else {
      tma_load_2d(to, map, from(k0), n0 / 2, mbarrier);
      tma_load_2d(to + TileN / 2 * kScaleBytesPerColumn, map, from(static_cast<int>(p.k) + k0), n0 / 2, mbarrier);
    }
  }

  // The first word of a column's scales in a stage, of an even k block.
  template <int TileN>
  __device__ __forceinline__ static int scale_index(const Nvfp4Gemm& p, int column) {
    constexpr int kWords = kScaleBytesPerColumn / 4;
    return interleaves_columns(p) ? (column / 2 + column % 2 * (TileN / 2)) * kWords + column % 2 * (kWords / 2)
                                  : column * kWords;
  }
  template <class T, int TileN, class Words>
  class ColumnScales : public Nvfp4ColumnScales<T> {
   public:
    __device__ __forceinline__ ColumnScales(const Nvfp4Gemm&, Words scales, int index, int k_block)
        : Nvfp4ColumnScales<T>(scales, index ^ (k_block & 1) * (kScaleBytesPerColumn / 8)) {}
  };
};

}  // namespace untorch::kernels::cuda
