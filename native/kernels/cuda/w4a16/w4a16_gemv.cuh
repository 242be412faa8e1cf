// Products of at most 16 rows with packed weights of four bits.
//
// Layout: a warp makes 16·Pairs columns (32, from 3 rows on, or Format::kLeastRows, 64, from 5 on 64 or 112) and takes
// turns with other warps along k, 128 at a step. It has a ring of stages of its own in shared memory, which cp.async
// fills ahead of it: the columns' weights as they are, 512 bytes for every 8; their scales, as `Format` has them
// (int4_scales.cuh, nvfp4_scales.cuh); x's rows, 256 bytes each, in 16-byte chunks permuted so that ldmatrix's eight
// rows come from different groups of banks. Warps meet at the end only. What a warp does with a stage is in
// mainloop_sm80.cuh.
//
// Bytes: 0.5 a weight, for int4 4/group for scale and zero (0.53 at group 128), for NVFP4 1/16 (0.56), once; x 2·m a k
// for every 32, 64 or 112 columns, from the second-level cache. Operations: for 256 weights of int4 a warp issues 8
// shifts and lop3, which have half a scheduler's rate, one matrix instruction and some two for the scales; for 256 of
// NVFP4 11 shifts and lop3, 4 half-precision multiplications and two for the scales: 727 for 8192 weights in all, 45 a
// clock and multiprocessor, where the memory of an H200 delivers 32.
#pragma once

#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/w4a16/problem.h"
#include "kernels/cuda/w4a16/mainloop_sm80.cuh"
#include "kernels/cuda/w4a16/weight_layout.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"

namespace untorch::kernels::cuda {
namespace {

// Tiles of 112 columns serve numbers of columns that are a multiple of seven, as in many models, where those of 64
// would leave an eighth of the num_sms without work.
constexpr int kGemvPairs = 4, kSevenPairs = 7;

// Rows: 1, 2, 4, 8 or 16, at least m.
template <class Format, int Rows, int Pairs>
struct Ring {
  static constexpr int kTurns = (Rows + 7) / 8;  // of the matrix instruction, which takes 8 rows
  static constexpr int kTiles = 2 * Pairs, kCols = 8 * kTiles;
  static constexpr int kX = kTiles * 512, kScales = kX + Rows * 256, kBytes = kScales + kCols * Format::kColumnBytes;
  // What two blocks (of few rows), or one, have room for on sm_80 and sm_90; of 16 rows, or seven pairs, on sm_90
  // alone.
  static constexpr bool kIsLarge = Rows > 8 || Pairs == kSevenPairs;
  static constexpr int kMost = kIsLarge ? Format::kNarrowShared16 : Format::kNarrowShared;
  static constexpr int kStages = Rows <= 2 ? 4 : kMost / kGemmWarps / kBytes < 3 ? 2 : 3;
  static constexpr int kResident = Rows <= 2 ? 2 : 1;   // blocks of a multiprocessor
  static constexpr int kSums = kTurns * 8 * kCols * 4;  // of a warp, at the end: eight rows whatever Rows is
  static constexpr int kShared = kGemmWarps * (kStages * kBytes > kSums ? kStages * kBytes : kSums);
};

// Wide: inner_k_tiles is 8, a lane's four words lie together.
template <class Format, class T, bool Wide, int Rows, int Pairs>
__global__ void __launch_bounds__(kGemmThreads, (Ring<Format, Rows, Pairs>::kResident))
    narrow_packed(typename Format::Gemm p, SmallGemm end, Shares shares) {
  using R = Ring<Format, Rows, Pairs>;
  constexpr int kTiles = R::kTiles, kCols = R::kCols, kStages = R::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  let_next_kernel_begin();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const Place place = place_of<kCols>(shares);
  const int depth = static_cast<int>(p.k);
  const int blocks = (depth + kW4A16BlockK - 1) / kW4A16BlockK, lane_words = p.inner_k_tiles / 2;
  // Columns there are; n is a multiple of 8.
  const std::int64_t left = p.n - place.first;
  const int columns = left >= kCols ? kCols : left > 0 ? static_cast<int>(left) : 0;
  const char* const words = static_cast<const char*>(p.weight) + place.first / 8 * p.k * 4;
  const typename Format::template Copies<kCols> scales(p, place.first, columns);
  unsigned char* const ring = memory + warp * (kStages * R::kBytes);

  // Where this lane's copies begin; what varies from stage to stage is added.
  const int x_row = lane / 16, x_chunk = lane % 16;
  const char* const my_words = words + lane * 16;
  const char* const my_x = static_cast<const char*>(p.x) + (x_row * p.x_row + x_chunk * 8) * 2;
  const std::int64_t tile_step = p.k * 4, x_step = p.x_row * 4;
  const int words_left = depth - lane * 4, width = static_cast<int>(p.x_width) - x_chunk * 8;
  const auto load_stage = [&](int stage, int block) {
    const std::uint32_t to = shared_address(ring + stage * R::kBytes);
    const int k0 = block * kW4A16BlockK;
    const int word_bytes = k0 < words_left ? 16 : 0, x_bytes = k0 < width ? 16 : 0;
    const char* from = my_words + std::int64_t{k0} * 4;
#pragma unroll
    for (int i = 0; i < kTiles; ++i, from += tile_step) {
      copy_chunk(to + i * 512 + lane * 16, from, i * 8 < columns ? word_bytes : 0);
    }
    from = my_x + std::int64_t{k0} * 2;
#pragma unroll
    for (int i = 0; i < (Rows + 1) / 2; ++i, from += x_step) {
      const int row = 2 * i + x_row;
      if (row < Rows) {
        copy_chunk(to + R::kX + row * 256 + ((x_chunk ^ (row & 7)) << 4), from, row < p.m ? x_bytes : 0);
      }
    }
    scales.load(to + R::kScales, k0);
  };

  wait_for_kernels_before();
  int block = place.turn;
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load_stage(i, block + i * place.turns);
    commit_copies();
  }
  constexpr int kTurns = R::kTurns;
  float acc[Pairs * kTurns * 4] = {};
  // Rows that are not there are other ones, and so are their sums; nobody reads those.
  const int row = (lane & 7) < Rows ? lane & 7 : Rows - 1;
  int stage = 0;
  for (; block < blocks; block += place.turns) {
    wait_copies_but<kStages - 2>();
    __syncwarp();  // this stage is here, and no lane reads the one before it any more
    load_stage(stage == 0 ? kStages - 1 : stage - 1, block + (kStages - 1) * place.turns);
    commit_copies();
    const unsigned char* const here = ring + stage * R::kBytes;
    const auto* const at = reinterpret_cast<const std::uint32_t*>(here);
    const std::uint32_t x_row = shared_address(here + R::kX + row * 256);
    const auto x_at = [&](int r, int j) { return x_row + r * 2048 + (((j * 4 + (lane >> 3)) ^ (row & 7)) << 4); };
    multiply_block<Format, T, Wide, Pairs, kTurns, kCols>(p, at, lane_words, here + R::kScales, 0, x_at, acc);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  wait_copies_but<0>();
  __syncthreads();

  // The sums take the stages' place.
  float* const sums = reinterpret_cast<float*>(memory);
  float* const own = sums + warp * kTurns * 8 * kCols + 2 * t * kCols + g;
#pragma unroll
  for (int i = 0; i < Pairs; ++i) {
    float low = 1.0f, high = 1.0f;
    if constexpr (Format::kScalesSums) {
      const std::int64_t column = place.first + i * 16 + g;
      low = Format::template factor<T>(p, column), high = Format::template factor<T>(p, column + 8);
    }
#pragma unroll
    for (int r = 0; r < kTurns; ++r) {
      float* const to = own + r * 8 * kCols + i * 16;
      const float* const sum = acc + (i * kTurns + r) * 4;
      to[0] = sum[0] * low, to[kCols] = sum[1] * low;
      to[8] = sum[2] * high, to[kCols + 8] = sum[3] * high;
    }
  }
  __syncthreads();
  finish<T, kTurns * 8, kCols>(end, sums, shares);
}

// How the work is divided: one tile of rows, however many there are.
template <class R>
Shares narrow_shares(SmallGemm p) {
  p.m = 1;
  p.num_sms = p.num_sms * R::kResident / 2;  // shares_of counts two blocks for each
  return shares_of(p, R::kCols, kW4A16BlockK, 2 * kW4A16BlockK);
}
inline std::int64_t blocks_of(const SmallGemm& p, const Shares& shares, int columns) {
  const std::int64_t per_block = std::int64_t{shares.tiles()} * columns;
  return ((p.n + per_block - 1) / per_block) << shares.cluster_bits;
}

template <class Format, class T, bool Wide, int Rows, int Pairs>
int launch_tiles_of(const typename Format::Gemm& p, const SmallGemm& end, Stream stream) {
  using R = Ring<Format, Rows, Pairs>;
  static_assert(R::kShared <= R::kMost);
  const Shares shares = narrow_shares<R>(end);
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(blocks_of(end, shares, R::kCols)));
  how.threads = kGemmThreads, how.shared_bytes = R::kShared;
  how.cluster = shares.cluster();
  how.early = p.early;
  return launch_kernel(narrow_packed<Format, T, Wide, Rows, Pairs>, how, stream, p, end, shares);
}

template <class Format, class T, bool Wide, int Rows>
int launch_gemv(const typename Format::Gemm& p, Stream stream) {
  SmallGemm end;
  end.m = p.m, end.n = p.n, end.k = p.k;
  end.c = p.bias, end.c_col = 1;
  end.out = p.out, end.out_row = p.n, end.out_col = 1;
  end.has_clusters = p.has_clusters;
  end.num_sms = p.num_sms;
  if constexpr (Rows <= 2) {
    return launch_tiles_of<Format, T, Wide, Rows, 2>(p, end, stream);
  } else {
    if constexpr (Wide && Rows >= 8) {  // with 4 rows they are slower
      using Four = Ring<Format, Rows, kGemvPairs>;
      using Seven = Ring<Format, Rows, kSevenPairs>;
      // The num_sms that have work, of those there are, in the mean of all turns.
      const auto busy = [&](const Shares& shares, int columns) {
        const std::int64_t blocks = blocks_of(end, shares, columns), all = p.num_sms;
        return static_cast<double>(blocks) / static_cast<double>((blocks + all - 1) / all * all);
      };
      const bool fits = p.max_shared_bytes >= Seven::kMost;
      if (fits && busy(narrow_shares<Seven>(end), Seven::kCols) > 1.05 * busy(narrow_shares<Four>(end), Four::kCols)) {
        return launch_tiles_of<Format, T, Wide, Rows, kSevenPairs>(p, end, stream);
      }
    }
    return launch_tiles_of<Format, T, Wide, Rows, kGemvPairs>(p, end, stream);
  }
}

template <class Format, class T, bool Wide>
int gemv_for_m(const typename Format::Gemm& p, Stream stream) {
  if constexpr (!Wide || Format::kLeastRows == 1) {
    if (p.m == 1) return launch_gemv<Format, T, Wide, 1>(p, stream);
    if (p.m == 2) return launch_gemv<Format, T, Wide, 2>(p, stream);
  }
  if (p.m <= 4) return launch_gemv<Format, T, Wide, 4>(p, stream);
  if constexpr (Wide) {
    if (p.m > 8) return launch_gemv<Format, T, Wide, 16>(p, stream);
  }
  return p.m <= 8 ? launch_gemv<Format, T, Wide, 8>(p, stream) : kNoKernel;
}

}  // namespace
}  // namespace untorch::kernels::cuda
