// Scales of int4 weights beside their tiles in shared memory: how they come there, and how a lane unpacks with them.
//
// A kernel of packed_*.cuh has a stage of columns and 128 k's; the structs here are its parameter: bytes of a column's
// scales in a stage, who copies them, and `Column`, a lane's view of one column. `Words` is where it has them from: a
// pointer to shared memory, or SharedWords.
#pragma once

#include "kernels/cuda/w4a16/int4_heuristic.h"
#include "kernels/cuda/w4a16/int4_fragments.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {

// The group's size is 1 << that.
__device__ __forceinline__ int bits_of_group(const Int4Gemm& p) { return __ffs(static_cast<int>(p.group)) - 1; }

struct Int4Sums {
  using Gemm = Int4Gemm;
  static constexpr bool kScalesSums = false, kByGroup = false;
};

// Codes are multiplied without scale and zero, which a group's sums get then: see unpack_codes.
struct Int4Groups {
  using Gemm = Int4Gemm;
  static constexpr bool kScalesSums = false, kByGroup = true;

  template <class T>
  __device__ static __forceinline__ void unpack_word(std::uint32_t word, std::uint32_t (&pairs)[4]) {
    unpack_codes<T>(word, pairs);
  }
  // Of a column's group, whose line of scales is given.
  template <class T>
  __device__ static __forceinline__ GroupFactors factors(const unsigned char* line, int column) {
    return group_factors<T>(reinterpret_cast<const std::uint32_t*>(line)[column]);
  }
};

// For w4a16_gemv.cuh: a line for each 32 k's, or one for all 128.
template <int Lines>
struct Int4GemvFormat : Int4Groups {
  static constexpr int kLines = Lines, kColumnBytes = 4 * Lines, kNarrowShared = kInt4GemvSharedBytes;
  static constexpr int kNarrowShared16 = kInt4GemvSharedBytesM16;
  // With four lines, 1 and 2 rows are faster in the kernel for 4, whose warps have more columns: of 4096 × 14336 14.4
  // µs instead of 16.8, of 14336 × 4096 14.0 instead of 16.1; 4096 × 4096 7.1 instead of 6.9.
  static constexpr int kLeastRows = Lines == 4 ? 4 : 1;

  // By the lanes of a warp.
  template <int Cols>
  class Copies {
   public:
    __device__ __forceinline__ Copies(const Int4Gemm& p, std::int64_t first, int columns)
        : lane_(static_cast<int>(threadIdx.x) % 32),
          columns_(columns),
          depth_(static_cast<int>(p.k)),
          group_bits_(bits_of_group(p)),
          step_(p.n * 4),
          scales_(static_cast<const char*>(p.scales) + first * 4) {}

    __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
#pragma unroll
      for (int r = 0; r < Lines; ++r) {
        const int k = k0 + r * (kW4A16BlockK / Lines);
        const char* const from = scales_ + std::int64_t{k >> group_bits_} * step_ + lane_ * 4;
#pragma unroll
        for (int i = 0; i < (Cols + 31) / 32; ++i) {
          const int column = i * 32 + lane_;
          const bool inside = k < depth_ && column < columns_;
          if (column < Cols) copy_word(to + (r * Cols + column) * 4, from + i * 128, inside ? 4 : 0);
        }
      }
    }

   private:
    int lane_, columns_, depth_, group_bits_;
    std::int64_t step_;
    const char* scales_;
  };
};

// A line for each group that begins in the block.
template <class T, int Cols, class Words>
class Int4Column {
 public:
  __device__ __forceinline__ Int4Column(const Int4Gemm& p, Words scales, int column)
      : scales_(scales), column_(column), group_bits_(bits_of_group(p)) {}
  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void unpack_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    unpack<T>(word, scale_pair<T>(scales_[(j * 32 >> group_bits_) * Cols + column_]), pairs);
  }

 private:
  Words scales_;
  int column_, group_bits_;
};

// A known number of lines: groups of 128 / Lines k's, or longer ones where it is 1.
template <class T, int Cols, int Lines>
class Int4ColumnOfLines {
 public:
  template <class Words>
  __device__ __forceinline__ Int4ColumnOfLines(const Int4Gemm&, Words scales, int column, int /*block*/) {
#pragma unroll
    for (int i = 0; i < Lines; ++i) scales_and_zeros_[i] = scales[i * Cols + column];
  }
  __device__ __forceinline__ void prepare(int) {}
  __device__ __forceinline__ void unpack_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
    unpack<T>(word, scale_pair<T>(scales_and_zeros_[j * Lines / 4]), pairs);
  }

 private:
  std::uint32_t scales_and_zeros_[Lines];
};

// For w4a16_gemm_sm80.cuh, 128 columns.
struct Int4Sm80Format : Int4Sums {
  static constexpr int kColumnBytes = 16;
  template <class T, int Cols, class Words>
  using Column = Int4Column<T, Cols, Words>;

  // By the first 128 threads of a block, 16 bytes each: warp i has line i.
  class Copies {
   public:
    __device__ __forceinline__ Copies(const Int4Gemm& p, int first) : depth_(static_cast<int>(p.k)) {
      const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
      group_bits_ = bits_of_group(p);
      const int line = warp << group_bits_;  // k's before this group, from the block's first on
      line_ = line < kW4A16BlockK && warp < 4 && lane * 4 < p.n - first ? line : depth_;
      from_ = static_cast<const char*>(p.scales) + (first + lane * 4) * 4;
      step_ = p.n * 4;
    }

    __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
      const auto thread = static_cast<int>(threadIdx.x);
      if (thread < 128) {
        const int k = k0 + line_;
        copy_chunk(to + thread * 16, from_ + std::int64_t{k >> group_bits_} * step_, k < depth_ ? 16 : 0);
      }
    }

   private:
    const char* from_;
    std::int64_t step_;
    int depth_, line_, group_bits_;
  };
};

// For w4a16_gemm_sm90.cuh: the lines of the groups of 128 k's, or the one of a longer group, as boxes of the scales.
template <int Lines>
struct Int4Sm90Format : Int4Sums {
  static constexpr int kColumnBytes = 4 * Lines;
  template <class T, int Cols, class Words>
  using Column = Int4ColumnOfLines<T, Cols, Lines>;

  static MatrixOfBoxes scale_boxes(const Int4Gemm& p, int columns) {
    return {.from = p.scales,
            .element_bytes = 4,
            .rows = p.k / p.group,
            .columns = p.n,
            .row_bytes = p.n * 4,
            .box_rows = Lines,
            .box_columns = columns};
  }
  template <int Cols>
  __device__ __forceinline__ static int place_of(const Int4Gemm&, int column) {
    return column;
  }
  template <int Cols>
  __device__ __forceinline__ static void copy_scales(const Int4Gemm& p, const TensorMap& map, std::uint32_t to,
                                                     int first, int k0, std::uint32_t barrier, std::uint64_t policy) {
    copy_box(to, map, first, k0 >> bits_of_group(p), barrier, policy);
  }
};
}  // namespace untorch::kernels::cuda
