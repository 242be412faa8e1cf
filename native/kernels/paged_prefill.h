// Attention of a step over a paged KV cache on sm_90: prefill of the sequences that have more than a few tokens in it,
// and decode of the others.
#pragma once

#include <cstdint>

#include "kernels/divisor.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

inline constexpr int kMaxPagedPrefillWidth = 256;

// As PagedAttention (paged_attention.h), but that keys and values have one width and q's dtype, that nothing is written
// to the pool, and that `offset` lies on the GPU. Pages out of range are read as page 0.
struct PagedPrefill {
  DType dtype{};  // of q, the pool and out: bfloat16 or float16
  std::int64_t tokens = 0, sequences = 0;
  int heads = 0, kv_heads = 0;
  int width = 0;  // a multiple of 8, at most kMaxPagedPrefillWidth
  float scale = 1;
  int window = 0, chunk = 0;
  int few = 0;                 // sequences of so many tokens are another kernel's: their rows are not written
  const void* q = nullptr;     // [tokens, heads, width], dense, 16-byte aligned
  const void* pool = nullptr;  // [blocks, pool_block elements], 16-byte aligned; pool_block is a multiple of width
  std::int64_t blocks = 0, pool_block = 0;
  const std::int64_t* offset = nullptr;       // one, a multiple of width
  int block = 0;                              // a multiple of 16
  const std::int32_t* block_table = nullptr;  // [sequences, table_columns]
  std::int64_t table_columns = 0;
  const std::int32_t *cu_seqlens_q = nullptr, *seqlens_k = nullptr;
  const float* sinks = nullptr;      // [heads], or null
  void* out = nullptr;               // [tokens, heads, width], dense, 16-byte aligned
  std::uint32_t* counter = nullptr;  // of row blocks, on the GPU: 0
};

// A row block has `row_tokens` tokens by the `row_heads` heads of a KV head, which share the keys.
struct PagedPrefillPlan {
  bool valid = false;
  int width = 0;  // the kernel's: 64, 96, 128 or 256
  int group = 0;  // heads of a KV head
  int row_heads = 0, row_tokens = 0, head_tiles = 0;
  int row_blocks = 0;       // at most; sequences begin new ones
  int items = 0, ctas = 0;  // items: row blocks of all heads
  int box_rows = 0;         // keys of one TMA load, all in one page
  // pairs: KV heads by head tiles.
  Divisor by_row_heads, by_row_tokens, by_head_tiles, by_pairs, by_block;
};

// Depends on shapes and the device alone, so that a CUDA graph serves any lengths.
PagedPrefillPlan plan_paged_prefill(const PagedPrefill& problem, int num_sms);
int paged_prefill(const PagedPrefill& problem, const PagedPrefillPlan& plan, Stream stream);

// Whether decode takes such layers. group: heads for each KV head.
constexpr bool takes_paged_decode(std::int64_t width, std::int64_t group, std::int64_t few) {
  return (width == 64 || width == 128) && group <= 8 && few >= 1;
}

// Of the same problem, the sequences of at most `few` tokens, or all with no more tokens than sequences, and zeros
// behind the last one. A unit is a slot by a KV head; a cluster of CTAs serves it. With no more tokens than sequences a
// slot is a token; otherwise a sequence, and what is behind the last one, has `each` slots, which take its tokens in
// turn.
struct PagedDecodePlan {
  bool valid = false;
  int heads = 0;  // the kernel's: 4 or 8 for each KV head
  int each = 1;
  int units = 0, cluster_bits = 0;
  bool pdl = false;
};

// Depends on shapes and the device alone, too.
PagedDecodePlan plan_paged_decode(const PagedPrefill& problem, int num_sms);
int paged_decode(const PagedPrefill& problem, const PagedDecodePlan& plan, Stream stream);

}  // namespace untorch::kernels::cuda
