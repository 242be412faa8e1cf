// Attention over a paged KV cache: sequences of any lengths in one batch, prefill and decode alike.
#pragma once

#include <cstdint>

#include "kernels/launcher.h"

namespace untorch::kernels {

// Tokens lie one behind the other, those of sequence s at [cu_seqlens_q[s], cu_seqlens_q[s + 1]); they are the last of
// its seqlens_k[s] positions. Position j of s is in block block_table[s][j / block]. A block of the pool has, from
// `offset` on, K [kv_heads, block, width] and V [kv_heads, block, width_v]. In a pool of int8 or float8_e4m3fn these
// are codes, and the scales of K and of V follow, bfloat16 [kv_heads, block] each: an element is code · scale, the
// scale max|x| / 127 or / 448 of a token and head, rounded up. Query i sees the keys j <= i with
//
//   i - window < j           where window > 0
//   i / chunk == j / chunk   where chunk > 0
//
// and score(i, j) = softcap · tanh(scale · q · k / softcap) + alibi · (j - i); softcap 0: without. sinks: a logit of
// each head that takes its share of the softmax and gives nothing.
struct PagedAttention {
  DType dtype{};       // of q, k, v and out: float32, bfloat16 or float16
  DType pool_dtype{};  // the same, int8 or float8_e4m3fn
  std::int64_t tokens = 0, sequences = 0, heads = 0, kv_heads = 0, width = 0, width_v = 0;
  float scale = 1.0f, softcap = 0.0f;
  std::int64_t window = 0, chunk = 0;
  const void* q = nullptr;  // [tokens, heads, width]
  std::int64_t q_token = 0, q_head = 0;
  const void *k = nullptr, *v = nullptr;  // [tokens, kv_heads, …], written to the pool first; null both: read only
  std::int64_t k_token = 0, k_head = 0, v_token = 0, v_head = 0;
  void* pool = nullptr;  // [blocks, pool_block elements]; of codes: offset and pool_block are even
  std::int64_t blocks = 0, pool_block = 0, offset = 0, block = 0;
  const std::int32_t* block_table = nullptr;  // [sequences, table_columns]
  std::int64_t table_columns = 0;
  const std::int32_t *cu_seqlens_q = nullptr, *seqlens_k = nullptr;
  const std::int64_t* slots = nullptr;             // [tokens]: block · size of a block + place; −1: not written
  const float *sinks = nullptr, *alibi = nullptr;  // [heads], or null
  void* out = nullptr;                             // [tokens, heads, width_v]; 0 for tokens of no sequence
};

namespace cpu {

// The first of the four lists that has a wrong value, and where; null if all are right.
struct PagedFault {
  const char* argument = nullptr;
  std::int64_t index = 0, value = 0;
};
PagedFault check_paged(const PagedAttention& p) noexcept;
// block is a multiple of 16. Throws std::bad_alloc.
void paged_attention(const PagedAttention& p);

}  // namespace cpu

}  // namespace untorch::kernels
