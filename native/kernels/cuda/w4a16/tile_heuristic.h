// Tile heuristic of the W4A16 sm_90 GEMM: the tile shape and the number of CTAs of its stream-K schedule, by a cost
// model.
#pragma once

#include <algorithm>

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// A tile shape, the µs that a CTA needs for one k block of it (128 k), and the µs of fix-up for each further CTA that
// contributes to the tile. estimate_microseconds with these figures describes 2,300 measurements on an H200, int4 and
// NVFP4, weights of 1280 × 1280 to 8192 × 28672, M from 9 to 1024: the plan that it chooses takes 0.3 % longer than the
// fastest, 10 % at most.
struct Sm90Tile {
  int m, n;
  double k_block_us, fixup_us;
};
inline constexpr Sm90Tile kSm90Tiles[] = {
    {8, 256, 0.49, 0.2},    {16, 256, 0.56, 0.3}, {32, 256, 0.67, 0.5},   {64, 256, 0.95, 0.85},
    {128, 192, 1.12, 1.25}, {192, 128, 1.1, 1.3}, {224, 128, 1.24, 2.75}, {256, 128, 1.46, 3.65},
};
constexpr int sm90_tile_n(int tile_m) {
  for (const Sm90Tile& tile : kSm90Tiles) {
    if (tile.m == tile_m) return tile.n;
  }
  return 0;
}

struct StreamKPlan {
  int tile_m = 0, tiles_m = 0, tiles_n = 0;
  int k_blocks = 0;  // of a tile
  int ctas = 0;

  std::int64_t tiles() const { return std::int64_t{tiles_m} * tiles_n; }
  std::int64_t total_k_blocks() const { return tiles() * k_blocks; }
  std::int64_t partial_floats() const { return std::int64_t{ctas} * tile_m * sm90_tile_n(tile_m); }
};

// µs, without the launch cost that all plans share.
inline double estimate_microseconds(const StreamKPlan& plan, const Sm90Tile& tile) {
  constexpr double kFixupUs = 1.4;  // if any partial sums go through global memory
  const std::int64_t k_blocks_per_cta = (plan.total_k_blocks() + plan.ctas - 1) / plan.ctas;
  const double mainloop = static_cast<double>(k_blocks_per_cta) * tile.k_block_us;
  const bool data_parallel = plan.total_k_blocks() % plan.ctas == 0 && k_blocks_per_cta % plan.k_blocks == 0;
  if (data_parallel) return mainloop;
  const std::int64_t contributors = (plan.k_blocks + k_blocks_per_cta - 1) / k_blocks_per_cta;
  return mainloop + kFixupUs + static_cast<double>(contributors) * tile.fixup_us;
}

// The plan with the least estimated time for M = m, which is at least 1.
inline StreamKPlan choose_stream_k_plan(const W4A16Gemm& p, std::int64_t m) {
  constexpr std::int64_t kMinKBlocks = 2;  // of a CTA
  const bool has_tile_m = sm90_tile_n(p.tile_m) != 0;
  StreamKPlan best;
  double best_us = 0;
  for (const Sm90Tile& tile : kSm90Tiles) {
    if (has_tile_m && tile.m != p.tile_m) continue;
    StreamKPlan plan;
    plan.tile_m = tile.m;
    plan.tiles_m = static_cast<int>((m + tile.m - 1) / tile.m);
    plan.tiles_n = static_cast<int>((p.n + tile.n - 1) / tile.n);
    plan.k_blocks = static_cast<int>(p.k / kW4A16BlockK);
    const auto consider = [&](std::int64_t ctas) {
      plan.ctas = static_cast<int>(ctas);
      const double us = estimate_microseconds(plan, tile);
      if (best.ctas == 0 || us < best_us) best = plan, best_us = us;
    };
    consider(std::clamp<std::int64_t>(plan.total_k_blocks() / kMinKBlocks, 1, p.num_sms));
    // Data-parallel: whole tiles for fewer CTAs, no fix-up. Not for small tiles: they are bound by memory, whose
    // bandwidth all SMs together use best.
    const std::int64_t tiles_per_cta = (plan.tiles() + p.num_sms - 1) / p.num_sms;
    if (tile.m >= 64 && plan.tiles() % tiles_per_cta == 0) consider(plan.tiles() / tiles_per_cta);
  }
  return best;
}

}  // namespace untorch::kernels::cuda
