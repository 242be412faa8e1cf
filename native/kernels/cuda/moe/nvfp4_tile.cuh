// What a tile of a product of a mixture of experts is made of, whatever instructions multiply: which lines of a weight
// and which rows of x a block copies to shared memory, and what becomes of the sums.
//
// A stage there: x's rows, 64 k's to 128 bytes, in 16-byte chunks permuted by the row; the weights' bytes as they are,
// 32 of a line for 64 k's, in an order that depends on the line; their scales, 4 bytes. In the first product the upper
// 8 of 16 lines are rows of the gate and the lower 8 the same of up, so that a column's two sums meet.
#pragma once

#include "kernels/cuda/moe/nvfp4_moe.h"
#include "kernels/cuda/moe/nvfp4_mainloop.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {

// The weight of one product and what surrounds it.
template <bool First>
struct MoeProduct {
  // Of a line: its expert's matrix is [lines, k].
  __device__ static std::int64_t lines(const Nvfp4Moe& p) { return First ? 2 * p.width : p.k; }
  __device__ static std::int64_t depth(const Nvfp4Moe& p) { return First ? p.k : p.width; }
  __device__ static const std::uint8_t* codes(const Nvfp4Moe& p) { return First ? p.w13 : p.w2; }
  __device__ static const std::uint8_t* scales(const Nvfp4Moe& p) { return First ? p.w13_scale : p.w2_scale; }
  // The row of the weight that line `line` of a tile is, where the tile's first column is `column`; -1: none.
  __device__ static __forceinline__ std::int64_t line_of(const Nvfp4Moe& p, int column, int line) {
    if constexpr (First) {
      const int at = column + line / 16 * 8 + line % 8;
      return at < p.width ? at + (line & 8 ? p.width : 0) : -1;
    } else {
      return column + line < p.k ? column + line : -1;
    }
  }
};

// The copies that a thread makes for each stage, in the order of k.
template <class Tile, bool First>
class MoeCopies {
  using Product = MoeProduct<First>;
  static constexpr int kLineChunks = 2 * Tile::kGroups, kLineStep = Tile::kThreads / kLineChunks,
                       kXChunks = 8 * Tile::kGroups, kXStep = Tile::kThreads / kXChunks,
                       kXCopies = Tile::kRows / kXStep;
  static constexpr int kDepth = Tile::kGroups * kMoeGroup, kCodeCopies = Tile::kLines / kLineStep,
                       kScaleThreads = Tile::kLines * Tile::kGroups;
  static constexpr unsigned kHasScales = 1, kHasCodes = 2, kHasX = 8;  // the latter two shifted by the copy
  static_assert(kCodeCopies <= 2 && kLineStep % 16 == 0 && kScaleThreads <= Tile::kThreads);

 public:
  __device__ __forceinline__ MoeCopies(const Nvfp4Moe& p, const MoeBlock& block, int column) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t depth = Product::depth(p);
    left_ = static_cast<int>(depth), groups_ = (left_ + kMoeGroup - 1) / kMoeGroup;
    whole_ = depth % kMoeGroup == 0 ? kDepth : left_ + 1;  // otherwise scales are not aligned
    const std::int64_t matrix = block.expert * Product::lines(p) * depth;
    const int line = thread / kLineChunks, chunk = thread % kLineChunks;
    const std::int64_t row = Product::line_of(p, column, line);
    has_ = (row >= 0 ? kHasCodes : 0) | (Product::line_of(p, column, line + kLineStep) >= 0 ? 2 * kHasCodes : 0);
    codes_ = Product::codes(p) + (matrix + (row >= 0 ? row : 0) * depth) / 2 + chunk * 16;
    line_bytes_ = static_cast<std::uint32_t>(depth) / 2 * (kLineStep / (First ? 2 : 1));
    codes_to_ =
        Tile::kX + line * (Tile::kGroups * 32) + ((chunk / 2 ^ moe_turn<Tile::kGroups>(line)) * 2 + chunk % 2) * 16;
    const std::int64_t scale_row = thread < kScaleThreads ? Product::line_of(p, column, thread / Tile::kGroups) : -1;
    has_ |= scale_row >= 0 ? kHasScales : 0;
    scales_ =
        Product::scales(p) + (matrix + (scale_row >= 0 ? scale_row : 0) * depth) / 16 + thread % Tile::kGroups * 4;
    const int x_row = thread / kXChunks, x_chunk = thread % kXChunks;
    x_to_ = x_chunk / 8 * Tile::kRows * 128 + x_row * 128 + ((x_chunk ^ x_row) & 7) * 16;
    x_ = static_cast<const char*>(First ? p.arranged : p.act);
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const int at = x_row + i * kXStep;
      has_ |= at < block.rows ? kHasX << i : 0;
      const int place = block.begin + (at < block.rows ? at : 0);
      const int from = First ? p.sorted[place] / static_cast<int>(p.top_k) : place;
      x_rows_[i] = static_cast<std::uint32_t>(from) * (groups_ * 8) + x_chunk;
    }
  }

  __device__ __forceinline__ int steps() const { return (groups_ + Tile::kGroups - 1) / Tile::kGroups; }

  // The next stage's k's into shared memory at `to`, of the first `Rows` rows of x; zeros where there is nothing.
  template <int Rows = Tile::kRows>
  __device__ __forceinline__ void load(unsigned char* memory, std::uint32_t to) {
    if (left_ >= whole_) [[likely]] {
#pragma unroll
      for (int i = 0; i < kCodeCopies; ++i) {
        copy_line(to + codes_to_ + i * (kLineStep * Tile::kGroups * 32), codes_ + i * line_bytes_,
                  has_ & kHasCodes << i ? 16 : 0);
      }
      if (kScaleThreads == Tile::kThreads || threadIdx.x < kScaleThreads) {
        copy_word(to + Tile::kX + Tile::kWeights + threadIdx.x * 4, scales_, has_ & kHasScales ? 4 : 0);
      }
      load_x<Rows>(to, true);
    } else {
      load_carefully(memory, to);
      load_x<Rows>(to, static_cast<int>(threadIdx.x) % kXChunks / 8 * kMoeGroup < left_);
    }
    left_ -= kDepth, codes_ += kDepth / 2, scales_ += kDepth / 16, x_ += kDepth * 2;
  }

 private:
  template <int Rows>
  __device__ __forceinline__ void load_x(std::uint32_t to, bool has_group) const {
#pragma unroll
    for (int i = 0; i < Rows / kXStep; ++i) {
      copy_chunk(to + x_to_ + i * kXStep * 128, x_ + std::uint64_t{x_rows_[i]} * 16,
                 has_group && has_ & kHasX << i ? 16 : 0);
    }
  }

  // Weights whose k ends within the stage, or whose lines begin at multiples of 8 bytes and scales anywhere.
  __device__ __forceinline__ void load_carefully(unsigned char* memory, std::uint32_t to) const {
    const int thread = static_cast<int>(threadIdx.x), left = left_ - thread % kLineChunks * 32;
#pragma unroll
    for (int i = 0; i < kCodeCopies; ++i) {
      const std::uint8_t* const from = codes_ + i * line_bytes_;
      const std::uint32_t at = to + codes_to_ + i * (kLineStep * Tile::kGroups * 32);
      copy_eight(at, from, left > 0 && has_ & kHasCodes << i ? 8 : 0);
      copy_eight(at + 8, from + 8, left > 16 && has_ & kHasCodes << i ? 8 : 0);
    }
    if (thread >= kScaleThreads) return;
    const int scales_left = has_ & kHasScales ? left_ / 16 - thread % Tile::kGroups * 4 : 0;
    std::uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < scales_left) word |= std::uint32_t{scales_[i]} << 8 * i;
    }
    *reinterpret_cast<std::uint32_t*>(memory + Tile::kX + Tile::kWeights + thread * 4) = word;
  }

  const std::uint8_t *codes_, *scales_;
  const char* x_;
  std::uint32_t line_bytes_;        // from a line to that of the second copy
  std::uint32_t x_rows_[kXCopies];  // in 16 bytes
  int left_, whole_;                // k's that are not loaded yet; from how many on a stage is simple
  int groups_, codes_to_, x_to_;
  unsigned has_;  // what there is to copy: kHas…
};

// act for a tile of Lines / 2 columns. sums: [planes][rows][pitch] in shared memory.
template <class T, class Tile>
__device__ __forceinline__ void finish_first(const Nvfp4Moe& p, const MoeBlock& block, int column, const float* sums) {
  constexpr int kColumns = Tile::kLines / 2, kSpan = kColumns < kMoeGroup ? kColumns : kMoeGroup;
  constexpr int kPart = kSpan / 8, kParts = kColumns / kPart;  // neighbours in act, a whole write; those of a row
  struct alignas(2 * kPart) Part {
    T values[kPart];
  };
  const float* const global = p.w13_global + (p.two_scales ? 2 : 1) * block.expert;
  const float gate_scale = global[0] * Nvfp4Values<T>::kUnshift,
              up_scale = global[p.two_scales ? 1 : 0] * Nvfp4Values<T>::kUnshift;
  const std::int64_t row_bytes = p.act_row * 2;
  const int offset = column % kMoeGroup / 16 * 2;  // of a part in its eight places
  char* const out = static_cast<char*>(p.act) + block.begin * row_bytes + (column / kMoeGroup * kMoeGroup + offset) * 2;
  const float* const bias = p.w13_bias == nullptr ? nullptr : p.w13_bias + block.expert * 2 * p.width + column;
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * kParts; i += Tile::kThreads) {
    const int row = i / kParts, group = i % kParts / 8, chunk = i % 8;
    if (column + group * kMoeGroup >= p.act_row) continue;
    Part part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int c = group * kMoeGroup + arranged_k(chunk * 8 + offset + j) - column % kMoeGroup;
      const float* const gate = sums + row * Tile::kPitch + c / 8 * 16 + c % 8;
      float gate_sum = gate[0], up_sum = gate[8];
      if constexpr (Tile::kPlanes == 2) gate_sum += gate[Tile::kPlane], up_sum += gate[Tile::kPlane + 8];
      gate_sum *= gate_scale, up_sum *= up_scale;
      if (bias != nullptr && column + c < p.width) gate_sum += bias[c], up_sum += bias[c + p.width];
      part.values[j] = narrow<T>(gated(p.swiglu, gate_sum, up_sum));
    }
    *reinterpret_cast<Part*>(out + row * row_bytes + group * (2 * kMoeGroup) + chunk * 16) = part;
  }
}

// results for a tile of Lines columns.
template <class T, class Tile>
__device__ __forceinline__ void finish_second(const Nvfp4Moe& p, const MoeBlock& block, int column, const float* sums) {
  constexpr int kQuads = Tile::kLines / 4;
  const float scale = p.w2_global[block.expert] * Nvfp4Values<T>::kUnshift;
  static_assert(Tile::kThreads % kQuads == 0);
  const int quad = static_cast<int>(threadIdx.x) % kQuads;
  if (column + quad * 4 >= p.k) return;
  float4 bias = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (p.w2_bias != nullptr) {
    bias = *reinterpret_cast<const float4*>(p.w2_bias + block.expert * p.k + column + quad * 4);
  }
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * kQuads; i += Tile::kThreads) {
    const int row = i / kQuads, pair = p.sorted[block.begin + row];
    const float factor = p.topk_weights[pair];
    const float* const own = sums + row * Tile::kPitch + quad * 4;
    float4 sum = *reinterpret_cast<const float4*>(own);
    if constexpr (Tile::kPlanes == 2) {
      const float4 other = *reinterpret_cast<const float4*>(own + Tile::kPlane);
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    *reinterpret_cast<float4*>(p.results + pair * p.k + column + quad * 4) =
        make_float4((sum.x * scale + bias.x) * factor, (sum.y * scale + bias.y) * factor,
                    (sum.z * scale + bias.z) * factor, (sum.w * scale + bias.w) * factor);
  }
}

inline constexpr std::int64_t kMoeMostDepth = 1 << 24;  // of k, so that 128 lines are less than 4 GiB apart

template <class Tile, bool First, class Kernel>
int launch_tiles(Kernel* kernel, const Nvfp4Moe& p, Stream stream) {
  // act has zeros up to whole groups.
  const std::int64_t depth = First ? p.k : p.width, columns = First ? p.act_row : p.k,
                     step = First ? Tile::kLines / 2 : Tile::kLines;
  const std::int64_t tiles = (columns + step - 1) / step,
                     chunks = First ? p.tokens * p.arranged_row : p.pairs() * p.act_row;
  if (tiles * p.blocks > 0x7fffffff || depth > kMoeMostDepth || chunks / 8 > 0xffffffff) return kNoKernel;
  // A product with little k has fewer stages than there could be, and leaves room for more blocks.
  constexpr int kDepth = Tile::kGroups * kMoeGroup;
  const std::int64_t steps = (depth + kDepth - 1) / kDepth;
  const int stages = steps < Tile::kStages ? static_cast<int>(steps) : Tile::kStages;
  const int used = stages * Tile::kBytes > Tile::kSums ? stages * Tile::kBytes : Tile::kSums;
  if (Tile::kShared > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
    if (code != cudaSuccess) return code;
  }
  kernel<<<static_cast<unsigned>(tiles * p.blocks), Tile::kThreads, static_cast<unsigned>(used + Tile::kAlign),
           stream>>>(p, static_cast<int>(tiles));
  return cudaGetLastError();
}

}  // namespace untorch::kernels::cuda
