// W4A16 GEMV, M up to 16 (1, 2, 4, 8 or 16 rows a tile): weights once from memory by a cp.async pipeline of each warp.
//
// A warp has a tile of 16·NPairs columns (32 or 48; 64 from M = 3 on, or Format::kMinTileM; 64 or 112 from M = 5 on)
// and a share of its k blocks (split-K over the warps of a CTA, then over a cluster: gemm/small_m.cuh). Each warp has
// stages of its own, so warps meet only at the end:
//
//   a stage in shared memory, one k block (128 k), 2 to 4 stages a warp
//     weight   [2·NPairs] 8-column tiles of 512 bytes, as packed
//     x        [TileM] rows of 256 bytes, 16-byte chunks XOR-swizzled by row: ldmatrix without bank conflicts
//     scales   as `Format` has them (int4_scales.cuh, nvfp4_scales.cuh)
//
// The step on a stage is mainloop_sm80.cuh: tensor cores serve M = 1, too.
//
// Bytes: 0.5 a weight, for int4 4 / group for scale and zero (0.53 at group 128), for NVFP4 1/16 (0.56), once; x 2·M a
// k for every 32, 64 or 112 columns, from L2. Operations: for 256 weights of int4 a warp issues 8 shifts and lop3,
// which have half a scheduler's rate, one mma.sync and some two instructions for scales; for 256 of NVFP4 11 shifts and
// lop3, 4 half-precision multiplications and two for scales: 727 for 8192 weights in all, 45 a clock and SM, where an
// H200's memory delivers 32.
#pragma once

#include "kernels/cuda/gemm/small_m.cuh"
#include "kernels/cuda/mma/cp_async_ldmatrix.cuh"
#include "kernels/cuda/mma/mma_sync.cuh"
#include "kernels/cuda/w4a16/mainloop_sm80.cuh"
#include "kernels/cuda/w4a16/problem.h"
#include "kernels/cuda/w4a16/weight_layout.cuh"

namespace untorch::kernels::cuda {
namespace {

// Tiles of 112 columns are for N that are a multiple of seven, as in many models, where tiles of 64 would leave an
// eighth of the SMs idle.
constexpr int kGemvPairs = 4, kSevenPairs = 7;
// For one and two rows: 32 columns, or 48 where those fill the SMs better (N = 6144 and 24576: 256 CTAs, and not 192,
// on 132 SMs).
constexpr int kTwoPairs = 2, kThreePairs = 3;

// TileM: 1, 2, 4, 8 or 16, at least M.
template <class Format, int TileM, int NPairs>
struct GemvPipeline {
  static constexpr int kMTiles = (TileM + 7) / 8;  // of mma.sync, 8 rows each
  static constexpr int kNTiles = 2 * NPairs, kTileN = 8 * kNTiles;
  static constexpr int kXOffset = kNTiles * 512, kScaleOffset = kXOffset + TileM * 256,
                       kStageBytes = kScaleOffset + kTileN * Format::kScaleBytesPerColumn;
  // What two CTAs (TileM up to 2), or one, have room for on sm_80 and sm_90; TileM 16, or seven pairs, on sm_90 alone.
  static constexpr bool kSm90Only = TileM > 8 || NPairs == kSevenPairs;
  static constexpr int kMaxSharedBytes = kSm90Only ? Format::kGemvSharedBytesM16 : Format::kGemvSharedBytes;
  static constexpr int kStages = TileM <= 2 ? 4 : kMaxSharedBytes / kGemmWarps / kStageBytes < 3 ? 2 : 3;
  static constexpr int kCtasPerSm = TileM <= 2 ? 2 : 1;               // by registers and shared memory
  static constexpr int kAccumulatorBytes = kMTiles * 8 * kTileN * 4;  // of a warp: eight rows an M tile
  static constexpr int kSharedBytes =
      kGemmWarps * (kStages * kStageBytes > kAccumulatorBytes ? kStages * kStageBytes : kAccumulatorBytes);
};

// Wide: inner_k_tiles is 8, a lane's four words are one 16-byte load.
template <class Format, class T, bool Wide, int TileM, int NPairs>
__global__ void __launch_bounds__(kGemmThreads, (GemvPipeline<Format, TileM, NPairs>::kCtasPerSm))
    w4a16_gemv_kernel(typename Format::Gemm p, SmallGemm problem, Shares shares) {
  using P = GemvPipeline<Format, TileM, NPairs>;
  constexpr int kNTiles = P::kNTiles, kTileN = P::kTileN, kStages = P::kStages;
  extern __shared__ __align__(128) unsigned char memory[];
  griddepcontrol_launch_dependents();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int g = lane / 4, t = lane % 4;
  const Place place = place_of<kTileN>(shares);
  const int k_end = static_cast<int>(p.k);
  const int k_blocks = (k_end + kW4A16BlockK - 1) / kW4A16BlockK, lane_words = p.inner_k_tiles / 2;
  // Columns in bounds; n is a multiple of 8.
  const std::int64_t left = p.n - place.first;
  const int columns = left >= kTileN ? kTileN : left > 0 ? static_cast<int>(left) : 0;
  const char* const weight = static_cast<const char*>(p.weight) + place.first / 8 * p.k * 4;
  const typename Format::template ScaleLoader<kTileN> scales(p, place.first, columns);
  unsigned char* const stages = memory + warp * (kStages * P::kStageBytes);

  // Where this lane's loads begin; what varies from stage to stage is added.
  const int x_row = lane / 16, x_chunk = lane % 16;
  const char* const lane_weight = weight + lane * 16;
  const char* const lane_x = static_cast<const char*>(p.x) + (x_row * p.x_stride + x_chunk * 8) * 2;
  const std::int64_t tile_step = p.k * 4, x_step = p.x_stride * 4;
  const int k_left = k_end - lane * 4, width = static_cast<int>(p.x_width) - x_chunk * 8;
  const auto load_weights = [&](int stage, int k_block) {
    const std::uint32_t to = shared_address(stages + stage * P::kStageBytes);
    const int k0 = k_block * kW4A16BlockK, weight_bytes = k0 < k_left ? 16 : 0;
    const char* from = lane_weight + std::int64_t{k0} * 4;
#pragma unroll
    for (int i = 0; i < kNTiles; ++i, from += tile_step) {
      cp_async_16(to + i * 512 + lane * 16, from, i * 8 < columns ? weight_bytes : 0);
    }
    scales.load(to + P::kScaleOffset, k0);
  };
  const auto load_x = [&](int stage, int k_block) {
    const std::uint32_t to = shared_address(stages + stage * P::kStageBytes);
    const int k0 = k_block * kW4A16BlockK, x_bytes = k0 < width ? 16 : 0;
    const char* from = lane_x + std::int64_t{k0} * 2;
#pragma unroll
    for (int i = 0; i < (TileM + 1) / 2; ++i, from += x_step) {
      const int row = 2 * i + x_row;
      if (row < TileM) {
        cp_async_16(to + P::kXOffset + row * 256 + ((x_chunk ^ (row & 7)) << 4), from, row < p.m ? x_bytes : 0);
      }
    }
  };

  int k_block = place.turn;
  if (!p.is_constant) griddepcontrol_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) load_weights(i, k_block + i * place.turns);
  if (p.is_constant) griddepcontrol_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    load_x(i, k_block + i * place.turns);
    cp_async_commit();  // the first one has the weights of all
  }
  constexpr int kMTiles = P::kMTiles;
  float acc[NPairs * kMTiles * 4] = {};
  // Out-of-bounds rows alias row TileM - 1; their accumulators are not stored.
  const int row = (lane & 7) < TileM ? lane & 7 : TileM - 1;
  int stage = 0;
  for (; k_block < k_blocks; k_block += place.turns) {
    cp_async_wait_group<kStages - 2>();
    __syncwarp();  // this stage has arrived, and no lane reads the one before it
    const int behind = stage == 0 ? kStages - 1 : stage - 1, k_next = k_block + (kStages - 1) * place.turns;
    load_weights(behind, k_next);
    load_x(behind, k_next);
    cp_async_commit();
    const unsigned char* const here = stages + stage * P::kStageBytes;
    const auto* const at = reinterpret_cast<const std::uint32_t*>(here);
    const std::uint32_t x_address = shared_address(here + P::kXOffset + row * 256);
    const auto x_at = [&](int r, int j) { return x_address + r * 2048 + (((j * 4 + (lane >> 3)) ^ (row & 7)) << 4); };
    mma_k_block<Format, T, Wide, NPairs, kMTiles, kTileN>(p, at, lane_words, here + P::kScaleOffset, 0, x_at, acc);
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
  cp_async_wait_group<0>();
  __syncthreads();

  // Accumulators to shared memory, over the stages.
  float* const sums = reinterpret_cast<float*>(memory);
  float* const own = sums + warp * kMTiles * 8 * kTileN + 2 * t * kTileN + g;
#pragma unroll
  for (int i = 0; i < NPairs; ++i) {
    float low = 1.0f, high = 1.0f;
    if constexpr (Format::kHasGlobalScale) {
      const std::int64_t column = place.first + i * 16 + g;
      low = Format::template global_scale<T>(p, column), high = Format::template global_scale<T>(p, column + 8);
    }
#pragma unroll
    for (int r = 0; r < kMTiles; ++r) {
      float* const to = own + r * 8 * kTileN + i * 16;
      const float* const sum = acc + (i * kMTiles + r) * 4;
      to[0] = sum[0] * low, to[kTileN] = sum[1] * low;
      to[8] = sum[2] * high, to[kTileN + 8] = sum[3] * high;
    }
  }
  __syncthreads();
  finish<T, kMTiles * 8, kTileN>(problem, sums, shares);
}

// How k is split: one tile in M.
template <class P>
Shares gemv_split_k(SmallGemm p) {
  p.m = 1;
  p.num_sms = p.num_sms * P::kCtasPerSm / 2;  // shares_of counts two CTAs an SM
  return shares_of(p, P::kTileN, kW4A16BlockK, 2 * kW4A16BlockK);
}
inline std::int64_t num_ctas(const SmallGemm& p, const Shares& shares, int columns) {
  const std::int64_t columns_per_cta = std::int64_t{shares.tiles()} * columns;
  return ((p.n + columns_per_cta - 1) / columns_per_cta) << shares.cluster_bits;
}

template <class Format, class T, bool Wide, int TileM, int NPairs>
int launch_gemv_tiles(const typename Format::Gemm& p, const SmallGemm& problem, Stream stream) {
  using P = GemvPipeline<Format, TileM, NPairs>;
  static_assert(P::kSharedBytes <= P::kMaxSharedBytes);
  const Shares shares = gemv_split_k<P>(problem);
  Launch how;
  how.blocks = dim3(static_cast<unsigned>(num_ctas(problem, shares, P::kTileN)));
  how.threads = kGemmThreads, how.shared_bytes = P::kSharedBytes;
  how.cluster = shares.cluster();
  how.pdl = p.pdl;
  return launch_kernel(w4a16_gemv_kernel<Format, T, Wide, TileM, NPairs>, how, stream, p, problem, shares);
}

template <class Format, class T, bool Wide, int TileM>
int launch_gemv(const typename Format::Gemm& p, Stream stream) {
  SmallGemm problem;
  problem.m = p.m, problem.n = p.n, problem.k = p.k;
  problem.c = p.bias, problem.c_col = 1;
  problem.out = p.out, problem.out_row = p.n, problem.out_col = 1;
  problem.has_clusters = p.has_clusters;
  problem.num_sms = p.num_sms;
  // The mean share of places for CTAs that have one, over the waves.
  const auto occupancy = [&](const Shares& shares, int columns, int ctas_per_sm) {
    const std::int64_t ctas = num_ctas(problem, shares, columns), places = std::int64_t{p.num_sms} * ctas_per_sm;
    return static_cast<double>(ctas) / static_cast<double>((ctas + places - 1) / places * places);
  };
  if constexpr (TileM <= 2) {
    if constexpr (Wide) {
      using Two = GemvPipeline<Format, TileM, kTwoPairs>;
      using Three = GemvPipeline<Format, TileM, kThreePairs>;
      // Two CTAs, each with what the driver reserves.
      const bool fits = p.max_shared_bytes >= 2 * (Three::kSharedBytes + 1024);
      if (fits && occupancy(gemv_split_k<Three>(problem), Three::kTileN, Three::kCtasPerSm) >
                      1.05 * occupancy(gemv_split_k<Two>(problem), Two::kTileN, Two::kCtasPerSm)) {
        return launch_gemv_tiles<Format, T, Wide, TileM, kThreePairs>(p, problem, stream);
      }
    }
    return launch_gemv_tiles<Format, T, Wide, TileM, kTwoPairs>(p, problem, stream);
  } else {
    if constexpr (Wide && TileM >= 8) {  // with TileM 4 seven pairs are slower
      using Four = GemvPipeline<Format, TileM, kGemvPairs>;
      using Seven = GemvPipeline<Format, TileM, kSevenPairs>;
      const bool fits = p.max_shared_bytes >= Seven::kMaxSharedBytes;
      if (fits && occupancy(gemv_split_k<Seven>(problem), Seven::kTileN, 1) >
                      1.05 * occupancy(gemv_split_k<Four>(problem), Four::kTileN, 1)) {
        return launch_gemv_tiles<Format, T, Wide, TileM, kSevenPairs>(p, problem, stream);
      }
    }
    return launch_gemv_tiles<Format, T, Wide, TileM, kGemvPairs>(p, problem, stream);
  }
}

template <class Format, class T, bool Wide>
int gemv_for_m(const typename Format::Gemm& p, Stream stream) {
  if constexpr (!Wide || Format::kMinTileM == 1) {
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
