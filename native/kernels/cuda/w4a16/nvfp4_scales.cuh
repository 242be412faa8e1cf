// Block scales of NVFP4 weights beside their tiles in shared memory: how they come there, and how a lane unpacks with
// them. What int4_scales.cuh is for int4.
//
// A column has 8 bytes for 128 k's. Where threads copy them, they are the quarter of a sector, of which the first-level
// cache keeps the rest for the blocks that follow; boxes bring those of two blocks (Nvfp4Sm90Format).
#pragma once

#include "kernels/cuda/w4a16/nvfp4_heuristic.h"
#include "kernels/cuda/w4a16/nvfp4_fragments.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"
#include "kernels/cuda/sm90/tensor_map.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {

// A lane's view of a column's scales. The four lanes of a column prepare two of its eight each, and give them to each
// other: all of the warp call it together.
template <class T>
class Nvfp4Column {
 public:
  template <class Words>
  __device__ __forceinline__ Nvfp4Column(const Nvfp4Gemm&, Words scales, int column)
      : Nvfp4Column(scales, 2 * column) {}

 protected:
  // first: which word the column's scales begin with.
  template <class Words>
  __device__ __forceinline__ Nvfp4Column(Words scales, int first) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    // Of two words the first 16 k's, or the others: every second byte of four.
    const std::uint32_t four = scales[first + t / 2];
    own_ = Values::scale_pair_of(four >> (t % 2 * 8));
  }

 public:
  // Before word j: for an even one the four scales of this and the next.
  __device__ __forceinline__ void prepare(int j) {
    if (j % 2 != 0) return;
    first_ = __shfl_sync(0xffffffffu, own_, j, 4), second_ = __shfl_sync(0xffffffffu, own_, j + 1, 4);
  }
  __device__ __forceinline__ void unpack_word(int j, std::uint32_t word, std::uint32_t (&pairs)[4]) const {
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
  std::uint32_t first_ = 0, second_ = 0;  // of the first 16 k's of two words, and of the others
};

struct Nvfp4Scales {
  using Gemm = Nvfp4Gemm;
  static constexpr bool kScalesSums = true, kByGroup = false;
  static constexpr int kColumnBytes = 8;
  template <class T, int Cols, class Words>
  using Column = Nvfp4Column<T>;

  // What a sum of the column is multiplied by; the column may be one that is not there.
  template <class T>
  __device__ __forceinline__ static float factor(const Nvfp4Gemm& p, std::int64_t column) {
    const std::int64_t at = !p.row_scales ? 0 : column < p.n ? column : p.n - 1;
    return p.global_scales[at] * Nvfp4Values<T>::kUnshift;
  }
};

// Copies by `Threads` threads in a row, of which this is number `thread`, for `Cols` columns of which `columns` are
// there.
template <int Cols, int Threads>
class Nvfp4Copies {
 public:
  __device__ __forceinline__ Nvfp4Copies(const Nvfp4Gemm& p, std::int64_t first, int columns, int thread)
      : thread_(thread),
        columns_(columns),
        depth_(static_cast<int>(p.k)),
        step_(p.k / 16 * Threads),
        from_(static_cast<const char*>(p.block_scales) + (first + thread) * (p.k / 16)) {}

  __device__ __forceinline__ void load(std::uint32_t to, int k0) const {
    const char* from = from_ + k0 / 16;
#pragma unroll
    for (int i = 0; i < (Cols + Threads - 1) / Threads; ++i, from += step_) {
      const int column = i * Threads + thread_;
      if (column < Cols) copy_half_chunk(to + column * 8, from, k0 < depth_ && column < columns_ ? 8 : 0);
    }
  }

 private:
  int thread_, columns_, depth_;
  std::int64_t step_;
  const char* from_;
};

// For w4a16_gemv.cuh.
struct Nvfp4GemvFormat : Nvfp4Scales {
  static constexpr int kNarrowShared = kNvfp4NarrowShared, kNarrowShared16 = kNvfp4NarrowShared16;
  static constexpr int kLeastRows = 1;

  template <int Cols>
  class Copies : public Nvfp4Copies<Cols, 32> {
   public:
    __device__ __forceinline__ Copies(const Nvfp4Gemm& p, std::int64_t first, int columns)
        : Nvfp4Copies<Cols, 32>(p, first, columns, static_cast<int>(threadIdx.x) % 32) {}
  };
};

// For w4a16_gemm_sm80.cuh.
struct Nvfp4Sm80Format : Nvfp4Scales {
  class Copies : public Nvfp4Copies<128, 256> {
   public:
    __device__ __forceinline__ Copies(const Nvfp4Gemm& p, int first)
        : Nvfp4Copies<128, 256>(p, first, static_cast<int>(p.n - first), static_cast<int>(threadIdx.x)) {}
  };
};

// For w4a16_gemm_sm90.cuh. Boxes are 16 bytes wide and begin at a multiple of that: a column has those of two blocks.
// They also want rows at a multiple of 16 bytes. Where k is an odd number of blocks, every other row is, so that the
// matrix is one of half as many rows, and even and odd columns come as two boxes.
struct Nvfp4Sm90Format : Nvfp4Scales {
  static constexpr int kColumnBytes = 16;

  __host__ __device__ static bool in_pairs(const Nvfp4Gemm& p) { return p.k / kW4A16BlockK % 2 != 0; }
  static MatrixOfBoxes scale_boxes(const Nvfp4Gemm& p, int columns) {
    const int together = in_pairs(p) ? 2 : 1;
    return {.from = p.block_scales,
            .element_bytes = 1,
            .rows = p.n / together,
            .columns = p.k / 16 * together,
            .row_bytes = p.k / 16 * together,
            .box_rows = columns / together,
            .box_columns = kColumnBytes};
  }
  template <int Cols>
  __device__ __forceinline__ static void copy_scales(const Nvfp4Gemm& p, const TensorMap& map, std::uint32_t to,
                                                     int first, int k0, std::uint32_t barrier,
                                                     std::uint64_t /*policy*/) {
    // A sector has those of four blocks: it is kept as usual.
    const auto from = [](int k) { return k / (2 * kW4A16BlockK) * kColumnBytes; };
    if (!in_pairs(p)) {
      copy_box(to, map, from(k0), first, barrier);
    } else {
      copy_box(to, map, from(k0), first / 2, barrier);
      copy_box(to + Cols / 2 * kColumnBytes, map, from(static_cast<int>(p.k) + k0), first / 2, barrier);
    }
  }

  // Of a column's words in a stage the first, of an even block.
  template <int Cols>
  __device__ __forceinline__ static int place_of(const Nvfp4Gemm& p, int column) {
    constexpr int kWords = kColumnBytes / 4;
    return in_pairs(p) ? (column / 2 + column % 2 * (Cols / 2)) * kWords + column % 2 * (kWords / 2) : column * kWords;
  }
  template <class T, int Cols, class Words>
  class Column : public Nvfp4Column<T> {
   public:
    __device__ __forceinline__ Column(const Nvfp4Gemm&, Words scales, int place, int block)
        : Nvfp4Column<T>(scales, place ^ (block & 1) * (kColumnBytes / 8)) {}
  };
};

}  // namespace untorch::kernels::cuda
