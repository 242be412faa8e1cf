// Tile shape and schedule of the sm_90 GEMM of 8-bit operands (w8_gemm_sm90.sm90a.cu), by a cost model.
#pragma once

#include <algorithm>

#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {

inline constexpr int kW8GemmBlockK = 128;

// A tile shape; the µs that a CTA needs for a k block (128 k) of it, where SMs are idle and where all are busy; for its
// epilogue; and of stream-K's fix-up for each further CTA that contributes to the tile. With these figures the plan
// takes 0.3 % longer than the fastest of those measured on an H200, 3 % at most: M from 32 to 2048, four weights of
// 2048 × 8192 to 4096 × 24576.
struct W8GemmTile {
  int m, n;
  double k_block_us, busy_k_block_us, epilogue_us, fixup_us;
};
inline constexpr W8GemmTile kW8GemmTiles[] = {
    {16, 64, 0.235, 0.235, 0.3, 0.2},  {32, 64, 0.235, 0.235, 0.3, 0.3}, {64, 64, 0.26, 0.26, 0.4, 0.5},
    {128, 128, 0.34, 0.42, 0.5, 1.25}, {192, 128, 0.54, 0.58, 0.7, 1.3}, {256, 128, 0.7, 0.74, 0.9, 3.3},
};
// The rows of a tile for up to kW8GemvMaxM rows of x in 16 bits: w8_pieces · 8.
inline constexpr int kMaxSplitRows = 24;

// Tiles [0, stream_k_tiles) are divided evenly among the CTAs, by k blocks (stream_k.cuh); then each takes whole tiles.
struct W8GemmPlan {
  int tile_m = 0, tile_n = 0, tiles_m = 0, tiles_n = 0;
  int k_blocks = 0;  // of a tile
  int ctas = 0, stream_k_tiles = 0;

  std::int64_t tiles() const { return std::int64_t{tiles_m} * tiles_n; }
  std::int64_t partial_floats() const {
    return stream_k_tiles == 0 ? 0 : std::int64_t{ctas} * std::max(tile_m, kMaxSplitRows) * tile_n;
  }
};

// µs of `k_blocks` of a CTA while `ctas` of them run. Up to eight have the same weights; memory gives 4 MB a µs.
inline double w8_mainloop_us(const W8GemmTile& tile, std::int64_t k_blocks, std::int64_t ctas, const W8GemmPlan& plan,
                             std::int64_t num_sms) {
  constexpr double kBytesPerUs = 4e6;
  const auto weights = static_cast<double>(tile.n * kW8GemmBlockK * ctas) / std::min(plan.tiles_m, 8);
  const double compute = 10 * ctas > 9 * num_sms ? tile.busy_k_block_us : tile.k_block_us;
  return static_cast<double>(k_blocks) * std::max(compute, weights / kBytesPerUs);
}

inline W8GemmPlan w8_gemm_plan(const W8Gemm& p) {
  constexpr std::int64_t kMinKBlocks = 3;  // of a CTA, in stream-K
  constexpr double kFixupUs = 1.4;         // if any partial sums go through global memory
  const std::int64_t num_sms = p.num_sms, k_blocks = (p.k + kW8GemmBlockK - 1) / kW8GemmBlockK;
  W8GemmPlan best;
  double best_us = 0;
  for (const W8GemmTile& tile : kW8GemmTiles) {
    // Up to 128 rows: the smallest tile that takes them all.
    const bool fits = p.m <= tile.m && (tile.m == 16 || p.m > tile.m / 2);
    if (p.m <= 128 ? tile.m > 128 || !fits : tile.m < 128) continue;
    // E4M3 has its sums in registers twice.
    if (p.weight_dtype == DType::kFloat8E4M3FN && tile.m > 128) continue;
    W8GemmPlan plan;
    plan.tile_m = tile.m, plan.tile_n = tile.n;
    plan.tiles_m = static_cast<int>((p.m + tile.m - 1) / tile.m);
    plan.tiles_n = static_cast<int>((p.n + tile.n - 1) / tile.n);
    plan.k_blocks = static_cast<int>(k_blocks);
    const auto consider = [&](std::int64_t ctas, std::int64_t stream_k_tiles, double us) {
      plan.ctas = static_cast<int>(ctas), plan.stream_k_tiles = static_cast<int>(stream_k_tiles);
      if (best.ctas == 0 || us < best_us) best = plan, best_us = us;
    };
    const std::int64_t tiles = plan.tiles(), full = tiles / num_sms, rest = tiles % num_sms;
    const auto waves = static_cast<double>(full + (rest > 0 ? 1 : 0));
    consider(std::min(tiles, num_sms), 0,
             w8_mainloop_us(tile, full * k_blocks, num_sms, plan, num_sms) +
                 w8_mainloop_us(tile, rest > 0 ? k_blocks : 0, rest, plan, num_sms) + waves * tile.epilogue_us);
    // Stream-K: all tiles, or where there are many those of the last two waves, one of them not full.
    const std::int64_t ctas = std::clamp<std::int64_t>(tiles * k_blocks / kMinKBlocks, 1, num_sms);
    if (rest == 0 || (full > 0 ? ctas < num_sms : ctas <= tiles)) continue;
    const std::int64_t share = (tiles * k_blocks + ctas - 1) / ctas;
    const std::int64_t contributors = share >= k_blocks ? 1 : (k_blocks + share - 1) / share;
    consider(ctas, full > 0 ? rest + num_sms : tiles,
             w8_mainloop_us(tile, share, ctas, plan, num_sms) + static_cast<double>(full + 1) * tile.epilogue_us +
                 kFixupUs + static_cast<double>(contributors) * tile.fixup_us);
  }
  return best;
}

// Stream-K's flags, 8 bytes each, at the start of the workspace; then partial sums.
inline std::int64_t w8_gemm_flags(const W8Gemm& p) { return (p.num_sms + 15) / 16 * 16; }
inline std::size_t w8_gemm_workspace(const W8Gemm& p) {
  const W8GemmPlan plan = w8_gemm_plan(p);
  return plan.stream_k_tiles == 0 ? 0 : static_cast<std::size_t>(w8_gemm_flags(p) * 8 + plan.partial_floats() * 4);
}

inline bool fits_w8_gemm_sm90(const W8Gemm& p) {
  constexpr std::int64_t kMaxSize = 1 << 24, kMaxKBlocks = std::int64_t{1} << 30;
  if (!p.has_wgmma || p.m > kMaxSize || p.n > kMaxSize || p.k > kMaxSize) return false;
  const W8GemmPlan plan = w8_gemm_plan(p);
  return (plan.tiles() + p.num_sms) * plan.k_blocks < kMaxKBlocks;
}
// Up to this M w8_gemm_sm90 multiplies E4M3 faster than cuBLASLt: above it promoting sums takes longer than reading
// weights. Twice as many rows where K is twice N or more: prefers_fp8_gemm_sm90.
inline constexpr std::int64_t kFp8GemmMaxM = 64;
// Whether w8_gemm_sm90 and w8_split_gemm_sm90 take the problem.
inline bool has_w8_gemm_sm90(const W8Gemm& p) { return fits_w8_gemm_sm90(p); }
inline bool has_w8_split_gemm_sm90(const W8Gemm& p) {
  return element_size(p.dtype) == 2 && p.m <= kW8GemvMaxM && fits_w8_gemm_sm90(p);
}

// out = x [m, k] · weightᵀ, both int8 or both E4M3, times the scales of rows and columns, + bias. int8: exact sums,
// rounded once; E4M3: sums of 128 of K by the tensor cores, added in float32. With scales of blocks row_scales are
// those of parts, [k blocks][w8_part_scales_row(m)]. x: dense, 16-byte aligned. p.workspace: w8_gemm_workspace bytes.
int w8_gemm_sm90(const W8Gemm& p, const void* x, const float* row_scales, Stream stream);

// M up to kW8GemvMaxM: likewise of split rows, for int8 and E4M3, with scales of outputs or blocks.
int w8_split_gemm_sm90(const W8Gemm& p, const SplitRows& x, Stream stream);

}  // namespace untorch::kernels::cuda
