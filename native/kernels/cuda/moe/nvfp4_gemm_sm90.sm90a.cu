// One product of a mixture of experts for many rows of an expert, by the tensor instructions of sm_90.
//
// Layout: a block has 256 lines of a weight and up to 160 rows of x, in three stages of 128 k's (nvfp4_tile.cuh)
// that cp.async fills. Four warpgroups have 64 lines each. The weights are the instruction's first operand, unpacked in
// registers, where a warp's 16 lines and 16 k's lie as in mma.m16n8k16; x is the second one, from shared memory, whose
// 128-byte rows are permuted as its swizzle wants them. Of a stage a warpgroup unpacks the next 32 k's while the tensor
// cores work on the last. A block of fewer rows has its own loop, for 32, 64 or 128 of them.
//
// Bytes: of shared memory and from the second-level cache a stage, 256·rows + 18432: x is what costs, so lines are
// many. Operations: for 32 k's a warp issues some 70 instructions, 280 clocks for the 16 of them, beside 2·rows clocks
// on the tensor cores. With few rows memory is the bound, and instructions take as long; from about 140 rows on it is
// the tensor cores, but for the start of a stage, when they wait for the first words. The share that is reached has not
// been measured yet.
#include "kernels/cuda/moe/nvfp4_tile.cuh"
#include "kernels/cuda/sm90/wgmma.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kPart = 128;  // rows of x an instruction, at most

struct Tile {
  static constexpr int kThreads = 512, kRows = kMoeWgmmaRows, kPlanes = 1, kLines = 256, kGroups = 2, kStages = 3;
  static constexpr int kGroupBytes = kRows * 128, kX = kGroups * kGroupBytes;
  static constexpr int kWeights = kLines * kGroups * 32, kScales = kLines * kGroups * 4;
  static constexpr int kBytes = kX + kWeights + kScales;
  static constexpr int kPitch = kLines + 4, kPlane = kRows * kPitch, kSums = kPlane * 4;
  static constexpr int kAlign = 1024, kShared = kStages * kBytes + kAlign;  // to begin at a multiple of it
  static_assert(kSums <= kStages * kBytes && kBytes % 1024 == 0 && kGroupBytes % 1024 == 0);
};

// sums [row][pitch] = x · weightᵀ for the first Rows rows of the block.
template <class T, int Rows, bool First>
__device__ __forceinline__ void multiply(MoeCopies<Tile, First>& copies, unsigned char* memory, std::uint32_t base) {
  constexpr int kStages = Tile::kStages, kFirst = Rows < kPart ? Rows : kPart, kRest = Rows - kFirst;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, line = warp * 16 + g;
  const int steps = copies.steps();
  const unsigned selector = 0x4040u + t * 0x0101u;  // of a word: byte t, twice, with zeros above
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < steps) copies.template load<Rows>(memory + i * Tile::kBytes, base + i * Tile::kBytes);
    commit_copies();
  }
  float acc[kFirst / 2] = {}, rest[kRest > 0 ? kRest / 2 : 1] = {};
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    wait_copies_but<kStages - 2>();
    publish_shared();
    __syncthreads();  // this stage is here, and the tensor cores are done with the one before it
    const unsigned char* const weights = memory + stage * Tile::kBytes + Tile::kX;
    const std::uint32_t x = base + stage * Tile::kBytes;
#pragma unroll
    for (int group = 0; group < Tile::kGroups; ++group) {
      uint2 words[2];
      std::uint32_t scales[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = line + 8 * i;
        words[i] = *reinterpret_cast<const uint2*>(weights + at * (Tile::kGroups * 32) +
                                                   (group ^ moe_turn<Tile::kGroups>(at)) * 32 + t * 8);
        const std::uint32_t four =
            *reinterpret_cast<const std::uint32_t*>(weights + Tile::kWeights + (at * Tile::kGroups + group) * 4);
        scales[i] = Nvfp4Values<T>::scale_pair_of(__byte_perm(four, 0, selector));
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        std::uint32_t low[4], high[4], operand[2][4];
        unpack_codes<T>(w == 0 ? words[0].x : words[0].y, scales[0], low);
        unpack_codes<T>(w == 0 ? words[1].x : words[1].y, scales[1], high);
        operands_of_words(low, high, operand);
        warpgroup_fence();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t from = x + group * Tile::kGroupBytes + (2 * w + half) * 32;
          warpgroup_mma<T>(acc, operand[half], operand_at(from));
          if constexpr (kRest > 0) warpgroup_mma<T>(rest, operand[half], operand_at(from + kFirst * 128));
        }
        warpgroup_commit();
        // The operand before this one is free. All are at a stage's end: ptxas keeps instructions of one turn of a loop
        // out of the next one by making all of them wait for each other.
        if (group == Tile::kGroups - 1 && w == 1) {
          warpgroup_wait<0>();
        } else {
          warpgroup_wait<1>();
        }
        if (group == 0 && w == 0) {
          if (step + kStages - 1 < steps) {
            const int next = (stage == 0 ? kStages - 1 : stage - 1) * Tile::kBytes;
            copies.template load<Rows>(memory + next, base + next);
          }
          commit_copies();
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(memory);
  const auto put = [&](int row, int i, float sum) {
    sums[(row + i / 4 * 8 + 2 * t + (i & 1)) * Tile::kPitch + line + (i >> 1 & 1) * 8] = sum;
  };
#pragma unroll
  for (int i = 0; i < kFirst / 2; ++i) put(0, i, acc[i]);
#pragma unroll
  for (int i = 0; i < kRest / 2; ++i) put(kFirst, i, rest[i]);
  __syncthreads();
}

template <class T, bool First>
__global__ void __launch_bounds__(Tile::kThreads, 1) multiply_wgmma(Nvfp4Moe p, int tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int at = static_cast<int>(blockIdx.x) / tiles;
  const MoeBlock block = p.list[at];
  if (block.rows == 0) return;
  const int column = (static_cast<int>(blockIdx.x) - at * tiles) * (First ? Tile::kLines / 2 : Tile::kLines);
  const std::uint32_t start = shared_address(memory), base = (start + 1023) / 1024 * 1024;
  unsigned char* const stages = memory + (base - start);
  MoeCopies<Tile, First> copies(p, block, column);
  if (block.rows <= 32) {
    multiply<T, 32, First>(copies, stages, base);
  } else if (block.rows <= 64) {
    multiply<T, 64, First>(copies, stages, base);
  } else if (block.rows <= 128) {
    multiply<T, 128, First>(copies, stages, base);
  } else {
    multiply<T, 160, First>(copies, stages, base);
  }
  const float* const sums = reinterpret_cast<const float*>(stages);
  if constexpr (First) {
    finish_first<T, Tile>(p, block, column, sums);
  } else {
    finish_second<T, Tile>(p, block, column, sums);
  }
}

template <bool First>
int wgmma_product(const Nvfp4Moe& p, Stream stream) {
  if (!p.has_wgmma || p.rows != Tile::kRows) return kNoKernel;
  if (p.dtype == DType::kFloat16) return launch_tiles<Tile, First>(multiply_wgmma<__half, First>, p, stream);
  if (p.dtype != DType::kBFloat16) return kNoKernel;
  return launch_tiles<Tile, First>(multiply_wgmma<__nv_bfloat16, First>, p, stream);
}

}  // namespace

int nvfp4_moe_gate_up_wgmma(const Nvfp4Moe& p, Stream stream) { return wgmma_product<true>(p, stream); }
int nvfp4_moe_down_wgmma(const Nvfp4Moe& p, Stream stream) { return wgmma_product<false>(p, stream); }

}  // namespace untorch::kernels::cuda
