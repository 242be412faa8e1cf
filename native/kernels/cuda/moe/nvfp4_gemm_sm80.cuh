// One product of a mixture of experts, in tiles: rows of one expert times rows of its weights.
//
// Layout: a block has 64 rows of a weight (`lines`), or 128 from 32 rows of x on, and a block of the route's list, 8 to
// 64 rows of x. Stages of 256 or 128 k's lie in shared memory, filled by cp.async ahead of their use: the weights'
// bytes as they are, the scales likewise, and x's rows, 64 k's to 128 bytes, all permuted in units of 32 or 16 bytes so
// that a warp's reads come from different banks. Four warps stand side by side and make 16 or 32 lines each; the other
// four take the other half of each stage's k. Of 16 lines and 16 k's, unpacked in registers, a matrix instruction's
// first operand is made, used for every 8 rows of x. Sums of the two halves of k meet in shared memory, which the
// stages have left.
//
// Bytes: 0.5625 a weight for every block of rows, from memory the first time; x 2·rows·k for every 64 or 128 lines,
// from the second-level cache. Operations: for 16 lines and 64 k's a warp issues some 80 instructions to unpack, and 6
// for every 8 rows, 4 of them on the tensor cores. Up to 16 rows memory is the bound, but not by much: with its copies
// a multiprocessor unpacks 21 bytes a clock, and the memory of an H200 delivers 18. At 64, loads of x from shared
// memory and the tensor cores take equally long.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/moe/nvfp4_tile.cuh"

namespace untorch::kernels::cuda {

// Rows of x: 8, 16, 32 or 64.
template <int Rows>
struct MoeTile {
  static constexpr int kThreads = 256, kRows = Rows, kPlanes = 2;  // planes of sums, for two halves of k
  static constexpr int kWarpTiles = Rows <= 16 ? 1 : 2;            // of 16 lines
  static constexpr int kLines = 64 * kWarpTiles;
  static constexpr int kGroups = Rows <= 16 ? 4 : 2;  // of 64 k's, in a stage
  static constexpr int kWeights = kLines * kGroups * 32, kScales = kLines * kGroups * 4, kX = Rows * kGroups * 128;
  static constexpr int kBytes = kX + kWeights + kScales;
  static constexpr int kStages = Rows == 64 ? 3 : 4;  // on sm_90 four blocks of 8 rows have room, on sm_80 two of 64
  // Blocks of a multiprocessor that registers are to allow.
  static constexpr int kResident = Rows == 8 ? 4 : Rows == 16 ? 3 : 2;
  static constexpr int kPitch = kLines + 4;  // of sums, so that lanes meet different banks
  static constexpr int kPlane = Rows * kPitch, kSums = kPlanes * kPlane * 4;
  static constexpr int kAlign = 0, kShared = kStages * kBytes > kSums ? kStages *kBytes : kSums;
};

template <class T, int Rows, bool First>
__global__ void __launch_bounds__(MoeTile<Rows>::kThreads, (MoeTile<Rows>::kResident))
    multiply_tile(Nvfp4Moe p, int tiles) {
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
  MoeCopies<Tile, First> copies(p, block, column);
  const int steps = copies.steps();

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) copies.load(memory + i * Tile::kBytes, base + i * Tile::kBytes);
    commit_copies();
  }

  float acc[kWarpTiles][Rows / 8][4] = {};
  const unsigned selector = 0x4040u + t * 0x0101u;  // of a word: byte t, twice, with zeros above
  const auto multiply_stage = [&](int stage, int step) {
    wait_copies_but<kStages - 2>();
    __syncthreads();  // this stage is here, and nobody reads the one before it any more
    if (step + kStages - 1 < steps) {
      const int next = (stage == 0 ? kStages - 1 : stage - 1) * Tile::kBytes;
      copies.load(memory + next, base + next);
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
  };
  // With few rows addresses are a good part of the instructions: constants then.
  if constexpr (Rows <= 16) {
    for (int step = 0; step < steps; step += kStages) {
#pragma unroll
      for (int stage = 0; stage < kStages; ++stage) {
        if (step + stage < steps) multiply_stage(stage, step + stage);
      }
    }
  } else {
    for (int step = 0, stage = 0; step < steps; ++step) {
      multiply_stage(stage, step);
      stage = stage == kStages - 1 ? 0 : stage + 1;
    }
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
    finish_first<T, Tile>(p, block, column, sums);
  } else {
    finish_second<T, Tile>(p, block, column, sums);
  }
}

template <class T, int Rows, bool First>
int launch_rows(const Nvfp4Moe& p, Stream stream) {
  return launch_tiles<MoeTile<Rows>, First>(multiply_tile<T, Rows, First>, p, stream);
}

template <class T, bool First>
int tile_of_rows(const Nvfp4Moe& p, Stream stream) {
  if (p.rows == 8) return launch_rows<T, 8, First>(p, stream);
  if (p.rows == 16) return launch_rows<T, 16, First>(p, stream);
  if (p.rows == 32) return launch_rows<T, 32, First>(p, stream);
  return p.rows == 64 ? launch_rows<T, 64, First>(p, stream) : kNoKernel;
}

template <bool First>
int tile_product(const Nvfp4Moe& p, Stream stream) {
  if (p.dtype == DType::kFloat16) return tile_of_rows<__half, First>(p, stream);
  return p.dtype == DType::kBFloat16 ? tile_of_rows<__nv_bfloat16, First>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
