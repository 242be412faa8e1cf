// How packed_stream shares out a product: the rows of its tiles, and the number of its thread blocks.
#pragma once

#include <algorithm>

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// A tile of so many rows: its columns; and µs that a thread block needs for 128 k's of it, and that each other thread
// block adds which has a part of the same tile. The times are such that estimate_microseconds describes 2,300
// measurements on an H200, int4 and NVFP4, of 1280 × 1280 to 8192 × 28672 weights with 9 to 1024 rows: what it chooses
// takes 0.3 % longer than the fastest, 10 % at most.
struct Sm90Tile {
  int rows, columns;
  double block, other;
};
inline constexpr Sm90Tile kSm90Tiles[] = {
    {8, 256, 0.49, 0.2},    {16, 256, 0.56, 0.3}, {32, 256, 0.67, 0.5},   {64, 256, 0.95, 0.85},
    {128, 192, 1.12, 1.25}, {192, 128, 1.1, 1.3}, {224, 128, 1.24, 2.75}, {256, 128, 1.46, 3.65},
};
constexpr int sm90_tile_n(int rows) {
  for (const Sm90Tile& tile : kSm90Tiles) {
    if (tile.rows == rows) return tile.columns;
  }
  return 0;
}

struct StreamKPlan {
  int rows = 0, row_tiles = 0, column_tiles = 0;  // of a tile; tiles
  int depth = 0;                                  // of a tile, in blocks of 128 k's
  int blocks = 0;                                 // of threads

  std::int64_t tiles() const { return std::int64_t{row_tiles} * column_tiles; }
  std::int64_t work() const { return tiles() * depth; }                                      // in blocks of 128 k's
  std::int64_t partials() const { return std::int64_t{blocks} * rows * sm90_tile_n(rows); }  // floats
};

// µs, less what all plans need.
inline double estimate_microseconds(const StreamKPlan& plan, const Sm90Tile& tile) {
  constexpr double kShared = 1.4;  // if sums go through memory at all
  const std::int64_t share = (plan.work() + plan.blocks - 1) / plan.blocks;
  const double own = static_cast<double>(share) * tile.block;
  if (plan.work() % plan.blocks == 0 && share % plan.depth == 0) return own;  // whole tiles
  const std::int64_t others = (plan.depth + share - 1) / share;
  return own + kShared + static_cast<double>(others) * tile.other;
}

// The fastest plan for m rows of the product, one at least.
inline StreamKPlan choose_stream_k_plan(const W4A16Gemm& p, std::int64_t m) {
  constexpr std::int64_t kLeastWork = 2;  // of a thread block
  const bool asked = sm90_tile_n(p.tile_rows) != 0;
  StreamKPlan best;
  double best_time = 0;
  for (const Sm90Tile& tile : kSm90Tiles) {
    if (asked && tile.rows != p.tile_rows) continue;
    StreamKPlan plan;
    plan.rows = tile.rows;
    plan.row_tiles = static_cast<int>((m + tile.rows - 1) / tile.rows);
    plan.column_tiles = static_cast<int>((p.n + tile.columns - 1) / tile.columns);
    plan.depth = static_cast<int>(p.k / kW4A16BlockK);
    const auto consider = [&](std::int64_t blocks) {
      plan.blocks = static_cast<int>(blocks);
      const double time = estimate_microseconds(plan, tile);
      if (best.blocks == 0 || time < best_time) best = plan, best_time = time;
    };
    consider(std::clamp<std::int64_t>(plan.work() / kLeastWork, 1, p.num_sms));
    // Whole tiles for every thread block, which then are fewer. Tiles of few rows wait for memory, which all of the
    // num_sms together read faster.
    const std::int64_t each = (plan.tiles() + p.num_sms - 1) / p.num_sms;
    if (tile.rows >= 64 && plan.tiles() % each == 0) consider(plan.tiles() / each);
  }
  return best;
}

}  // namespace untorch::kernels::cuda
