// One product of a mixture of experts, in tiles: rows of one expert times rows of its weights.
//
// Layout: a block has 64 rows of a weight (`lines`), or 128 from 32 rows of x on, and a block of the route's list, 8 to
// 64 rows of x. Stages of 256 or 128 k's lie in shared memory, filled by cp.async ahead of their use: the weights'
// bytes as they are, the scales likewise, and x's rows, 64 k's to 128 bytes, all permuted in units of 32 or 16 bytes so
// that a warp's reads come from different banks. Four warps stand side by side and make 16 or 32 lines each; the other
// four take the other half of each stage's k. Of 16 lines and 16 k's, unpacked in registers, a matrix instruction's
// first operand is made, used for every 8 rows of x. In the first product the upper 8 of 16 lines are rows of the gate
// and the lower 8 the same of up, so that a column's two sums meet in one thread.
//
// Sums of the two halves of k meet in shared memory, which the stages have left.
//
// Bytes: 0.5625 a weight for every block of rows, from memory the first time; x 2·rows·k for every 64 or 128 lines,
// from the second-level cache. Operations: for 16 lines and 64 k's a warp issues some 80 instructions to unpack, and 6
// for every 8 rows, 4 of them on the tensor cores. Up to 16 rows memory is the bound (a multiprocessor unpacks 27 bytes
// a clock, the memory of an H200 delivers 18); at 64, loads of x from shared memory and the tensor cores take equally
// long. The share that is reached has not been measured yet.
#pragma once

#include "kernels/cuda/gemm_mma.cuh"
#include "kernels/cuda/nvfp4_moe.h"
#include "kernels/cuda/nvfp4_moe_weights.cuh"
#include "kernels/cuda/tile_memory.cuh"

namespace untorch::kernels::cuda {

inline constexpr int kMoeThreads = 256;

// Rows of x: 8, 16, 32 or 64.
template <int Rows>
struct MoeTile {
  static constexpr int kWarpTiles = Rows <= 16 ? 1 : 2;  // of 16 lines
  static constexpr int kLines = 64 * kWarpTiles;
  static constexpr int kGroups = Rows <= 16 ? 4 : 2;  // of 64 k's, in a stage
  static constexpr int kWeights = kLines * kGroups * 32, kScales = kLines * kGroups * 4, kX = Rows * kGroups * 128;
  static constexpr int kBytes = kX + kWeights + kScales;
  static constexpr int kStages = Rows == 8 ? 5 : Rows == 64 ? 3 : 4;  // two blocks have room on sm_80
  static constexpr int kPitch = kLines + 4;                           // of sums, so that lanes meet different banks
  static constexpr int kSums = 2 * Rows * kPitch * 4;
  static constexpr int kShared = kStages * kBytes > kSums ? kStages* kBytes : kSums;
};

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

// The copies that a thread makes for each stage.
template <int Rows, bool First>
class MoeCopies {
  using Tile = MoeTile<Rows>;
  using Product = MoeProduct<First>;
  static constexpr int kLineChunks = 2 * Tile::kGroups, kLineStep = kMoeThreads / kLineChunks,
                       kXChunks = 8 * Tile::kGroups, kXStep = kMoeThreads / kXChunks, kXCopies = Rows / kXStep;
  static_assert(Tile::kLines / kLineStep == 2 && kLineStep % 16 == 0 && Tile::kLines * Tile::kGroups == kMoeThreads);

 public:
  __device__ __forceinline__ MoeCopies(const Nvfp4Moe& p, const MoeBlock& block, int column) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t depth = Product::depth(p);
    depth_ = static_cast<int>(depth), groups_ = (depth_ + kMoeGroup - 1) / kMoeGroup;
    chunk_ = thread % kLineChunks;
    const std::int64_t matrix = block.expert * Product::lines(p) * depth;
    const int line = thread / kLineChunks;
    std::int64_t row = Product::line_of(p, column, line);
    has_[0] = row >= 0, has_[1] = Product::line_of(p, column, line + kLineStep) >= 0;
    codes_ = Product::codes(p) + (matrix + (row >= 0 ? row : 0) * depth) / 2 + chunk_ * 16;
    codes_to_ =
        Tile::kX + line * (Tile::kGroups * 32) + ((chunk_ / 2 ^ moe_turn<Tile::kGroups>(line)) * 2 + chunk_ % 2) * 16;
    row = Product::line_of(p, column, thread / Tile::kGroups);
    has_scale_ = row >= 0;
    scales_ = Product::scales(p) + (matrix + (row >= 0 ? row : 0) * depth) / 16 + thread % Tile::kGroups * 4;
    const int x_row = thread / kXChunks, x_chunk = thread % kXChunks;
    x_group_ = x_chunk / 8;
    x_to_ = x_group_ * Rows * 128 + x_row * 128 + ((x_chunk ^ x_row) & 7) * 16;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      const int at = x_row + i * kXStep;
      has_x_[i] = at < block.rows;
      const int place = block.begin + (has_x_[i] ? at : 0);
      const std::int64_t from = First ? p.sorted[place] / static_cast<int>(p.top_k) : place;
      x_[i] = static_cast<std::uint32_t>(from) * (groups_ * 8) + x_chunk;
    }
  }

  __device__ __forceinline__ int steps() const { return (groups_ + Tile::kGroups - 1) / Tile::kGroups; }

  // The stage's k's into shared memory at `to`; zeros where there is nothing.
  __device__ __forceinline__ void load(const Nvfp4Moe& p, unsigned char* memory, std::uint32_t to, int step) const {
    const int group = step * Tile::kGroups, k = group * kMoeGroup;
    const int left = depth_ - k - chunk_ * 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint8_t* const from = codes_ + k / 2 + i * (kLineStep / (First ? 2 : 1)) * std::int64_t{depth_ / 2};
      const std::uint32_t at = to + codes_to_ + i * (kLineStep * Tile::kGroups * 32);
      if (depth_ % 32 == 0) [[likely]] {
        copy_line(at, from, has_[i] && left > 0 ? 16 : 0);
      } else {  // lines begin at multiples of 8 bytes
        copy_eight(at, from, has_[i] && left > 0 ? 8 : 0);
        copy_eight(at + 8, from + 8, has_[i] && left > 16 ? 8 : 0);
      }
    }
    const int thread = static_cast<int>(threadIdx.x), scale_to = Tile::kX + Tile::kWeights + thread * 4;
    const std::uint8_t* const from = scales_ + k / 16;
    const int scales_left = (depth_ - k) / 16 - thread % Tile::kGroups * 4;
    if (depth_ % 64 == 0) [[likely]] {
      copy_word(to + scale_to, from, has_scale_ && scales_left > 0 ? 4 : 0);
    } else {
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (has_scale_ && i < scales_left) word |= std::uint32_t{from[i]} << 8 * i;
      }
      *reinterpret_cast<std::uint32_t*>(memory + scale_to) = word;
    }
    const bool has_group = group + x_group_ < groups_;
    const char* const x = static_cast<const char*>(First ? p.arranged : p.act) + k * 2;
#pragma unroll
    for (int i = 0; i < kXCopies; ++i) {
      copy_chunk(to + x_to_ + i * kXStep * 128, x + std::uint64_t{x_[i]} * 16, has_group && has_x_[i] ? 16 : 0);
    }
  }

 private:
  const std::uint8_t *codes_, *scales_;
  std::uint32_t x_[kXCopies];  // in 16 bytes
  int codes_to_, x_to_, depth_, groups_, chunk_, x_group_;
  bool has_[2], has_x_[kXCopies], has_scale_;
};

// act for a tile of Lines / 2 columns. sums: [2][Rows][pitch] in shared memory.
template <class T, int Rows>
__device__ __forceinline__ void finish_first(const Nvfp4Moe& p, const MoeBlock& block, int column, const float* sums) {
  using Tile = MoeTile<Rows>;
  constexpr int kColumns = Tile::kLines / 2, kPart = kColumns / 8;  // a part: neighbours in act, a whole write
  struct alignas(2 * kPart) Part {
    T values[kPart];
  };
  const float* const global = p.w13_global + (p.two_scales ? 2 : 1) * block.expert;
  const float gate_scale = global[0] * Nvfp4Values<T>::kUnshift,
              up_scale = global[p.two_scales ? 1 : 0] * Nvfp4Values<T>::kUnshift;
  const std::int64_t row_bytes = p.act_row * 2;
  char* const out = static_cast<char*>(p.act) + block.begin * row_bytes + column / kMoeGroup * (2 * kMoeGroup) +
                    column % kMoeGroup / 16 * 4;
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * 8; i += kMoeThreads) {
    const int row = i / 8, chunk = i % 8;
    Part part;
#pragma unroll
    for (int j = 0; j < kPart; ++j) {
      const int c = (chunk >> 2) * 8 + (chunk >> 1 & 1) * 2 + (chunk & 1) + j / 2 * 16 + j % 2 * 4;
      const float* const gate = sums + row * Tile::kPitch + c / 8 * 16 + c % 8;
      const float* const other = gate + Rows * Tile::kPitch;
      part.values[j] = narrow<T>(gated((gate[0] + other[0]) * gate_scale, (gate[8] + other[8]) * up_scale));
    }
    *reinterpret_cast<Part*>(out + row * row_bytes + chunk * 16) = part;
  }
}

// results for a tile of Lines columns.
template <class T, int Rows>
__device__ __forceinline__ void finish_second(const Nvfp4Moe& p, const MoeBlock& block, int column, const float* sums) {
  using Tile = MoeTile<Rows>;
  constexpr int kQuads = Tile::kLines / 4;
  const float scale = p.w2_global[block.expert] * Nvfp4Values<T>::kUnshift;
  for (int i = static_cast<int>(threadIdx.x); i < block.rows * kQuads; i += kMoeThreads) {
    const int row = i / kQuads, quad = i % kQuads, pair = p.sorted[block.begin + row];
    if (column + quad * 4 >= p.k) continue;
    const float factor = p.topk_weights[pair];
    const float* const own = sums + row * Tile::kPitch + quad * 4;
    const float4 a = *reinterpret_cast<const float4*>(own),
                 b = *reinterpret_cast<const float4*>(own + Rows * Tile::kPitch);
    *reinterpret_cast<float4*>(p.results + pair * p.k + column + quad * 4) =
        make_float4((a.x + b.x) * scale * factor, (a.y + b.y) * scale * factor, (a.z + b.z) * scale * factor,
                    (a.w + b.w) * scale * factor);
  }
}

template <class T, int Rows, bool First>
__global__ void __launch_bounds__(kMoeThreads, 2) multiply_tile(Nvfp4Moe p, int tiles) {
  using Tile = MoeTile<Rows>;
  constexpr int kWarpTiles = Tile::kWarpTiles, kStages = Tile::kStages, kGroups = Tile::kGroups;
  extern __shared__ __align__(128) unsigned char memory[];
  const int at = static_cast<int>(blockIdx.x) / tiles;
  const MoeBlock block = p.list[at];
  if (block.rows == 0) return;
  const int column = (static_cast<int>(blockIdx.x) - at * tiles) * (First ? Tile::kLines / 2 : Tile::kLines);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, side = warp % 4, other = warp / 4;
  const std::uint32_t base = shared_address(memory);
  const MoeCopies<Rows, First> copies(p, block, column);
  const int steps = copies.steps();

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) copies.load(p, memory + i * Tile::kBytes, base + i * Tile::kBytes, i);
    commit_copies();
  }

  float acc[kWarpTiles][Rows / 8][4] = {};
  const unsigned selector = 0x4040u + t * 0x0101u;  // of a word: byte t, twice, with zeros above
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    wait_copies_but<kStages - 2>();
    __syncthreads();  // this stage is here, and nobody reads the one before it any more
    if (step + kStages - 1 < steps) {
      const int next = (stage == 0 ? kStages - 1 : stage - 1) * Tile::kBytes;
      copies.load(p, memory + next, base + next, step + kStages - 1);
    }
    commit_copies();
    const unsigned char* const here = memory + stage * Tile::kBytes;
    const std::uint32_t x = base + stage * Tile::kBytes + (lane & 7) * 128;
#pragma unroll
    for (int i = 0; i < kGroups / 2; ++i) {
      const int group = other * (kGroups / 2) + i;
      uint2 words[kWarpTiles][2];
      std::uint32_t scales[kWarpTiles][2];
#pragma unroll
      for (int j = 0; j < kWarpTiles * 2; ++j) {
        const int line = (side * kWarpTiles * 2 + j) * 8 + g;
        const unsigned char* const from = here + Tile::kX + line * (kGroups * 32);
        words[j / 2][j % 2] = *reinterpret_cast<const uint2*>(from + (group ^ moe_turn<kGroups>(line)) * 32 + t * 8);
        const std::uint32_t four =
            *reinterpret_cast<const std::uint32_t*>(here + Tile::kX + Tile::kWeights + (line * kGroups + group) * 4);
        scales[j / 2][j % 2] = Nvfp4Values<T>::scale_pair_of(__byte_perm(four, 0, selector));
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t pairs[kWarpTiles][2][4];
#pragma unroll
        for (int j = 0; j < kWarpTiles * 2; ++j) {
          const uint2 both = words[j / 2][j % 2];
          unpack_codes<T>(w == 0 ? both.x : both.y, scales[j / 2][j % 2], pairs[j / 2][j % 2]);
        }
#pragma unroll
        for (int r = 0; r < Rows / 8; ++r) {
          std::uint32_t b[4];
          load_matrices(b, x + group * (Rows * 128) + r * 1024 + (((w * 4 + (lane >> 3)) ^ (lane & 7)) << 4));
#pragma unroll
          for (int j = 0; j < kWarpTiles; ++j) {
            const auto& low = pairs[j][0];
            const auto& high = pairs[j][1];
            mma<T>(acc[j][r], low[0], high[0], low[1], high[1], b[0], b[1]);
            mma<T>(acc[j][r], low[2], high[2], low[3], high[3], b[2], b[3]);
          }
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();

  float* const sums = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int j = 0; j < kWarpTiles; ++j) {
#pragma unroll
    for (int r = 0; r < Rows / 8; ++r) {
      float* const to = sums + (other * Rows + r * 8 + 2 * t) * Tile::kPitch + (side * kWarpTiles + j) * 16 + g;
      to[0] = acc[j][r][0], to[Tile::kPitch] = acc[j][r][1];
      to[8] = acc[j][r][2], to[Tile::kPitch + 8] = acc[j][r][3];
    }
  }
  __syncthreads();
  if constexpr (First) {
    finish_first<T, Rows>(p, block, column, sums);
  } else {
    finish_second<T, Rows>(p, block, column, sums);
  }
}

template <class T, int Rows, bool First>
int launch_tile(const Nvfp4Moe& p, Stream stream) {
  using Tile = MoeTile<Rows>;
  // act has zeros up to whole groups.
  const std::int64_t columns = First ? p.act_row : p.k, step = First ? Tile::kLines / 2 : Tile::kLines;
  const std::int64_t tiles = (columns + step - 1) / step;
  if (tiles * p.blocks > 0x7fffffff) return kNoKernel;
  const auto kernel = multiply_tile<T, Rows, First>;
  if (Tile::kShared > 48 * 1024) {
    const cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kShared);
    if (code != cudaSuccess) return code;
  }
  kernel<<<static_cast<unsigned>(tiles * p.blocks), kMoeThreads, Tile::kShared, stream>>>(p, static_cast<int>(tiles));
  return cudaGetLastError();
}

template <class T, bool First>
int tile_of_rows(const Nvfp4Moe& p, Stream stream) {
  if (p.rows == 8) return launch_tile<T, 8, First>(p, stream);
  if (p.rows == 16) return launch_tile<T, 16, First>(p, stream);
  if (p.rows == 32) return launch_tile<T, 32, First>(p, stream);
  return p.rows == 64 ? launch_tile<T, 64, First>(p, stream) : kNoKernel;
}

template <bool First>
int tile_product(const Nvfp4Moe& p, Stream stream) {
  if (p.blocks == 0) return 0;
  if (p.dtype == Scalar::kFloat16) return tile_of_rows<__half, First>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? tile_of_rows<__nv_bfloat16, First>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
