// Products of some dozens of rows with int4 weights.
//
// Layout: a block makes a tile of 128 columns and Rows rows (16 to 128) from blocks of 128 k's in shared memory: x's
// rows, 256 bytes each, in 16-byte chunks permuted so that ldmatrix's eight rows come from different groups of banks;
// the weights as they are, 512 bytes for every 8 columns; the scales, a line a group. cp.async fills four stages
// (three for 128 rows), of which one is used. Of the 8 warps four stand side by side, 32 columns each; the other four
// take the other half of the rows, or of each block's k where there are up to 64. Weights are unpacked in registers:
// they are the matrix instruction's first operand, as in int4_narrow.cu, 16 columns and 16 k's, and used for every 8
// rows of the warp.
//
// How k is shared between blocks: int4_tile.cuh.
//
// Bytes: 0.53 a weight (group 128) for every 128 rows, x 2·m·k for every 128 columns from the second-level cache.
// Operations: 2·m·n·k on the tensor cores; a warp unpacks 1024 weights with 60 instructions for 4 matrix instructions
// every 8 rows, so that from about 32 rows on it is the tensor cores that are busy. On an H200 memory is the bound to
// about 90 rows. The share that is reached has not been measured yet.
#include "kernels/cuda/int4_choice.h"
#include "kernels/cuda/int4_tile.cuh"
#include "kernels/cuda/int4_weights.cuh"

namespace untorch::kernels::cuda {
namespace {

template <int Rows>
struct Stage {
  static constexpr int kX = Rows * 2 * kInt4BlockK;
  static constexpr int kBytes = kX + kWeightBytes + kScaleBytes;
  static constexpr int kCount = Rows == 128 ? 3 : 4;  // what a multiprocessor of sm_80 has room for
};
template <int Rows>
constexpr int shared_bytes() {
  constexpr int stages = Stage<Rows>::kCount * Stage<Rows>::kBytes, sums = Rows * kPitch * 4;
  return stages > sums ? stages : sums;
}
static_assert(shared_bytes<128>() == kInt4SharedOf128 && shared_bytes<64>() == kInt4SharedOf64);

// Wide: inner_k_tiles is 8, a lane's four words lie together.
template <class T, bool Wide, int Rows>
__global__ void __launch_bounds__(kThreads, Rows >= 64 ? 1 : 2) mma_int4(Int4Gemm p, Split split) {
  constexpr bool kHalves = Rows <= 64;  // the second four warps have the other half of k
  constexpr int kWarpRows = kHalves ? Rows : Rows / 2, kTiles = kWarpRows / 8, kWords = kHalves ? 2 : 4;
  constexpr int kStages = Stage<Rows>::kCount;
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4, side = warp % 4, other = warp / 4;
  const int rank = split.rank();
  const int first = static_cast<int>(blockIdx.x) / split.parts * kCols, top = static_cast<int>(blockIdx.y) * Rows;
  const int group_bits = __ffs(static_cast<int>(p.group)) - 1, lane_words = p.inner_k_tiles / 2;
  const int blocks = static_cast<int>((p.k + kInt4BlockK - 1) / kInt4BlockK);
  const int begin = rank * split.depth, end = begin + split.depth < blocks ? begin + split.depth : blocks;
  const std::uint32_t base = shared_address(memory);

  const int thread = static_cast<int>(threadIdx.x), row = thread / 16, chunk = thread % 16;
  const StageCopies copies(p, top, first, row * 256 + ((chunk ^ (row & 7)) << 4));

#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (begin + i < end) copies.load<Rows, 16 * 256, Stage<Rows>::kX>(base + i * Stage<Rows>::kBytes, begin + i);
    commit_copies();
  }

  float acc[2][kTiles][4] = {};
  const int first_row = kHalves ? 0 : other * kWarpRows, first_word = kHalves ? other * 2 : 0;
  int stage = 0;
  for (int block = begin; block < end; ++block) {
    wait_copies_but<kStages - 2>();
    __syncthreads();  // this stage is here, and nobody reads the one before it any more
    {
      const int next = stage == 0 ? kStages - 1 : stage - 1;
      if (block + kStages - 1 < end) {
        copies.load<Rows, 16 * 256, Stage<Rows>::kX>(base + next * Stage<Rows>::kBytes, block + kStages - 1);
      }
      commit_copies();
    }
    const unsigned char* const here = memory + stage * Stage<Rows>::kBytes;
    const std::uint32_t x = base + stage * Stage<Rows>::kBytes + (first_row + (lane & 7)) * 256;
    const auto* const words = reinterpret_cast<const std::uint32_t*>(here + Stage<Rows>::kX) + side * 4 * 128;
    const auto* const scales =
        reinterpret_cast<const std::uint32_t*>(here + Stage<Rows>::kX + kWeightBytes) + side * 32 + g;
    std::uint32_t word[4][kWords];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (Wide && kWords == 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(words + i * 128 + lane * 4);
        word[i][0] = v.x, word[i][1] = v.y, word[i][2] = v.z, word[i][3] = v.w;
      } else if constexpr (Wide) {
        const uint2 v = *reinterpret_cast<const uint2*>(words + i * 128 + lane * 4 + first_word);
        word[i][0] = v.x, word[i][1] = v.y;
      } else {
#pragma unroll
        for (int j = 0; j < kWords; ++j) word[i][j] = words[i * 128 + word_at(lane_words, first_word + j, lane)];
      }
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int line = (first_word + j) * 32 >> group_bits;
      std::uint32_t a[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) unpack<T>(word[i][j], scale_pair(scales[line * kCols + i * 8]), a[i]);
      const std::uint32_t chunk = ((first_word + j) * 4 + (lane >> 3)) ^ (lane & 7);
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        std::uint32_t b[4];
        load_matrices(b, x + r * (8 * 256) + (chunk << 4));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma<T>(acc[i][r], a[2 * i][0], a[2 * i + 1][0], a[2 * i][1], a[2 * i + 1][1], b[0], b[1]);
          mma<T>(acc[i][r], a[2 * i][2], a[2 * i + 1][2], a[2 * i][3], a[2 * i + 1][3], b[2], b[3]);
        }
      }
    }
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();

  // The sums take the stages' place, [row][column].
  float* const sums = reinterpret_cast<float*>(memory);
  const auto each = [&](auto&& body) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
#pragma unroll
        for (int v = 0; v < 4; ++v) {
          const int row = first_row + r * 8 + 2 * t + (v & 1), column = side * 32 + i * 16 + g + (v >> 1) * 8;
          body(sums[row * kPitch + column], acc[i][r][v]);
        }
      }
    }
  };
  if (!kHalves || other == 0) each([](float& to, float value) { to = value; });
  if (kHalves) {
    __syncthreads();
    if (other == 1) each([](float& to, float value) { to += value; });
  }
  __syncthreads();

  finish_tile<T, Rows>(p, split, sums, top, first);
}

// Adds up what the parts left in the workspace, [part][m][n].
template <class T>
__global__ void __launch_bounds__(kThreads) add_parts(Int4Gemm p, int parts) {
  const std::int64_t pairs = p.m * p.n / 2, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < pairs; i += step) {
    float2 sum{0.0f, 0.0f};
    for (int r = 0; r < parts; ++r) {
      const float2 part = reinterpret_cast<const float2*>(p.workspace)[r * pairs + i];
      sum.x += part.x, sum.y += part.y;
    }
    store_pair<T>(p, 2 * i / p.n, 2 * i % p.n, sum);
  }
}

template <class T, bool Wide, int Rows>
int launch_mma(const Int4Gemm& p, Stream stream) {
  constexpr int kBytes = shared_bytes<Rows>();
  return launch_tiles<Rows>(mma_int4<T, Wide, Rows>, p, kBytes, stream);
}

template <class T, bool Wide>
int mma_of_rows(const Int4Gemm& p, Stream stream) {
  switch (int4_tile_rows(p.m, p.max_shared_bytes)) {
    case 16:
      return launch_mma<T, Wide, 16>(p, stream);
    case 32:
      return launch_mma<T, Wide, 32>(p, stream);
    case 64:
      return launch_mma<T, Wide, 64>(p, stream);
    default:
      return launch_mma<T, Wide, 128>(p, stream);
  }
}

template <class T>
int mma_of(const Int4Gemm& p, Stream stream) {
  return p.inner_k_tiles == 8 ? mma_of_rows<T, true>(p, stream) : mma_of_rows<T, false>(p, stream);
}

}  // namespace

int int4_add_parts(const Int4Gemm& p, int parts, Stream stream) {
  const unsigned blocks = blocks_for(p.m * p.n / 2, kThreads);
  if (p.dtype == Scalar::kFloat16) {
    add_parts<__half><<<blocks, kThreads, 0, stream>>>(p, parts);
  } else {
    add_parts<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(p, parts);
  }
  return cudaGetLastError();
}

std::size_t int4_mma_workspace(const Int4Gemm& p) {
  const Split split = split_of(p, int4_tile_rows(p.m, p.max_shared_bytes));
  return split.parts == 1 || split.cluster ? 0 : static_cast<std::size_t>(split.parts * p.m * p.n) * sizeof(float);
}

int int4_mma(const Int4Gemm& p, Stream stream) {
  if (p.m == 0 || p.n == 0) return 0;
  if (p.dtype == Scalar::kFloat16) return mma_of<__half>(p, stream);
  return p.dtype == Scalar::kBFloat16 ? mma_of<__nv_bfloat16>(p, stream) : kNoKernel;
}

}  // namespace untorch::kernels::cuda
