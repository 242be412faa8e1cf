// The CPU's attention problem: FlashAttention's online softmax over blocks of keys. Raw pointers, strides in elements.
// Included by *.isa.cpp files, so it includes nothing with inline functions.
#pragma once

#include <cstdint>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {

// A [batch, heads, length, width] array.
template <class T>
struct HeadsRef {
  T* data;
  std::int64_t batch_stride, head_stride, row_stride, col_stride;
};

// out = softmax(scale·Q·Kᵀ + mask)·V for every batch entry and head; query head h reads key head h / (heads /
// kv_heads). A row that sees no key at all (everything −inf) gives zeros and a logsumexp of 0, as in PyTorch.
template <class T>
struct Attention {
  std::int64_t batch, heads, kv_heads, queries, keys, width;
  T scale;
  bool causal;  // query i sees keys 0…i
  HeadsRef<const T> query, key, value;
  HeadsRef<const T> mask;  // [batch, heads, queries, keys], strides 0 where it broadcasts; data may be null
  HeadsRef<T> out;
  HeadsRef<T> logsumexp;  // [batch, heads, queries, 1]
};

// The same in bfloat16 or float16. Scores, softmax, sums and the logsumexp are float32, and so is the mask. With
// AMX and, on AMD's CPUs, AVX512_BF16 both GEMMs multiply bfloat16, the probabilities being rounded; elsewhere operands
// are widened.
struct HalfAttention {
  HalfType type;
  std::int64_t batch, heads, kv_heads, queries, keys, width;
  float scale;
  bool causal;
  HeadsRef<const std::uint16_t> query, key, value;
  HeadsRef<const float> mask;
  HeadsRef<std::uint16_t> out;
  HeadsRef<float> logsumexp;
};

// Parallel over batch × heads × blocks of queries. Throws std::bad_alloc.
void attention(const Attention<float>& problem);
void attention(const Attention<double>& problem);
void attention(const HalfAttention& problem);

}  // namespace untorch::kernels::cpu
