// A CTA's tile of an attention problem: which rows, which keys, masks and the log-sum-exp. Shared by the mma.sync and
// the float32 kernel.
#pragma once

#include <cmath>

#include "kernels/cuda/attention/instances.h"
#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return -INFINITY; }

// 2^x in one instruction; 0 for -infinity.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Row r of a CTA's head group is query r / pack of head first_head + r % pack: with several query heads on one key
// head and few queries, the heads fill the tile and the keys are read once.
// It lies in shared memory: the loop over the keys needs the registers.
struct AttentionCta {
  int batch, first_head, kv_head, split;
  int first_query, queries;  // of this sequence
  int first_key, keys;
  int rows, row;             // rows of the head group, the CTA's first one; no work when row >= rows
  int tile_begin, tile_end;  // tiles of keys that this CTA reads
  int full_begin, full_end;  // those of them that every row sees whole
  int shift;
  std::int64_t key_at, value_at;  // offsets of this head's first key and value

  __device__ __forceinline__ void locate(const Attention& p, const AttentionPlan& plan, int tile_rows, int tile_keys) {
    unsigned id = blockIdx.x;
    const auto splits = static_cast<unsigned>(plan.splits), section = static_cast<unsigned>(plan.section);
    const auto row_blocks = static_cast<unsigned>(plan.row_blocks);
    split = static_cast<int>(id % splits);
    id /= splits;
    const unsigned groups = static_cast<unsigned>(p.heads / plan.pack);
    const unsigned slots = static_cast<unsigned>(p.batch) * groups;
    const unsigned which = id / (section * row_blocks), rest = id - which * (section * row_blocks);
    const unsigned in_section = min(section, slots - which * section);
    const unsigned slot = which * section + rest % in_section;
    batch = static_cast<int>(slot / groups);
    first_head = static_cast<int>(slot % groups) * plan.pack;
    kv_head = first_head / (p.heads / p.kv_heads);
    first_query = first_key = 0, queries = p.queries, keys = p.keys;
    if (p.first_query != nullptr) {
      first_query = p.first_query[batch];
      queries = p.first_query[batch + 1] - first_query;
    }
    if (p.first_key != nullptr) {
      first_key = p.first_key[batch];
      keys = p.first_key[batch + 1] - first_key;
    }
    if (p.used_keys != nullptr) keys = max(0, min(keys, p.used_keys[batch]));
    rows = queries * plan.pack;
    row = static_cast<int>(row_blocks - 1 - rest / in_section) * tile_rows;
    if (row >= rows) return;
    key_at = key_offset(p.key), value_at = key_offset(p.value);
    shift = p.bottom_right ? keys - queries : 0;
    // Lengths and limits are at most 2^29: their sums stay within 32 bits.
    const int first = position(row, plan.pack) + shift;
    const int last = position(min(row + tile_rows, rows) - 1, plan.pack) + shift;
    const int end = p.right < 0 ? keys : min(keys, last + p.right + 1), begin = p.left < 0 ? 0 : max(0, first - p.left);
    tile_begin = begin / tile_keys;
    tile_end = end <= begin ? tile_begin : (end + tile_keys - 1) / tile_keys;
    const int whole = p.right < 0 ? keys : min(keys, first + p.right + 1);
    full_begin = p.left < 0 ? 0 : (max(0, last - p.left) + tile_keys - 1) / tile_keys;
    full_end = max(0, whole) / tile_keys;
    if (splits > 1) {
      const int each = (tile_end - tile_begin + plan.splits - 1) / plan.splits, stop = tile_end;
      tile_begin = min(tile_begin + split * each, stop);
      tile_end = min(tile_begin + each, stop);
    }
  }

  static __device__ __forceinline__ int position(int r, int pack) { return pack == 1 ? r : r / pack; }

  // The keys that row r sees: [low, high].
  __device__ __forceinline__ void visible(const Attention& p, int pack, int r, int& low, int& high) const {
    const int at = position(r, pack) + shift;
    high = p.right < 0 ? keys - 1 : min(keys - 1, at + p.right);
    low = p.left < 0 ? 0 : at - p.left;
  }

  __device__ __forceinline__ std::int64_t offset(const Heads& heads, int r, int pack) const {
    const int at = position(r, pack), head = first_head + (r - at * pack);
    return batch * heads.batch + head * heads.head + (static_cast<std::int64_t>(first_query) + at) * heads.row;
  }
  __device__ __forceinline__ std::int64_t key_offset(const Heads& heads) const {
    return batch * heads.batch + kv_head * heads.head + static_cast<std::int64_t>(first_key) * heads.row;
  }
  __device__ __forceinline__ std::int64_t bias_offset(const Attention& p, int r, int pack) const {
    const int at = position(r, pack), head = first_head + (r - at * pack);
    return batch * p.bias_batch + head * p.bias_head + at * p.bias_row;
  }
  // Row r's index in the partial results of this split.
  __device__ __forceinline__ std::int64_t partial(const Attention& p, int r, int pack) const {
    const int at = position(r, pack), head = first_head + (r - at * pack);
    return ((static_cast<std::int64_t>(split) * p.batch + batch) * p.heads + head) * p.queries + at;
  }
  __device__ __forceinline__ void store_lse(const Attention& p, const AttentionPlan& plan, int r, float value) const {
    if (plan.splits > 1) {
      plan.partial_lse[partial(p, r, plan.pack)] = value;
    } else if (p.lse != nullptr) {
      const int at = position(r, plan.pack), head = first_head + (r - at * plan.pack);
      p.lse[batch * p.lse_batch + head * p.lse_head + (p.lse_batch == 0 ? first_query : 0) + at] = value;
    }
  }
  // The rows of the log-sum-exp beyond the last query, by the CTA of the last queries.
  __device__ __forceinline__ void pad_lse(const Attention& p, int pack, int tile_rows, int threads) const {
    if (p.lse == nullptr || split != 0 || row + tile_rows < rows || (row >= rows && row > 0)) return;
    for (int h = 0; h < pack; ++h) {
      float* lse = p.lse + batch * p.lse_batch + (first_head + h) * p.lse_head;
      for (int at = queries + static_cast<int>(threadIdx.x); at < p.lse_rows; at += threads) lse[at] = INFINITY;
    }
  }
};

__device__ __forceinline__ void clear_random_state(const Attention& p) {
  if (p.random_state != nullptr && blockIdx.x == 0 && threadIdx.x < 3) p.random_state[threadIdx.x] = 0;
}

}  // namespace
}  // namespace untorch::kernels::cuda
