// What paged attention reads and where: elements of the model and of pages, keys and values of a position, the
// workspace. Included by *.isa.cpp files only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention_bf16.h"
#include "kernels/cpu/attention/paged_codes.h"
#include "kernels/cpu/attention/paged_levels.h"
#include "kernels/cpu/attention/softmax.h"
#include "kernels/cpu/gemm/gemm_half_dot.h"
#include "kernels/paged_attention.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using Bits = std::uint16_t;
// What elements of the model are, and those of a page; Int8 and Fp8 are other kinds of pages.
struct Float {
  using type = float;
  static V load(const float* p) { return UNTORCH_ISA::load(p); }
  static V part(const float* p, std::int64_t count) { return load_part(p, count); }
  static void put(float* p, V v, std::int64_t count) {
    if (count >= N) return store(p, v);
    float values[N];
    store(values, v);
    for (std::int64_t i = 0; i < count; ++i) p[i] = values[i];
  }
};
template <HalfType H>
struct Half16 {
  using type = Bits;
  static constexpr HalfType kType = H;
  static V load(const Bits* p) { return load_half<H>(p); }
  static V part(const Bits* p, std::int64_t count) { return load_half_part<H>(p, count); }
  static void put(Bits* p, V v, std::int64_t count) {
    if (count >= N) return store_half<H>(p, v);
    store_half_part<H>(p, v, count);
  }
};

template <class S>
inline constexpr bool kIsCodes = sizeof(typename S::type) == 1;
template <class S>
inline constexpr bool kIsBFloat16 = false;
template <>
inline constexpr bool kIsBFloat16<Half16<HalfType::kBFloat16>> = true;

// `count` elements as float32; zeros up to `padded`.
template <class E>
void widen(const typename E::type* from, std::int64_t count, std::int64_t padded, float* to) {
  std::int64_t i = 0;
  for (; i + N <= count; i += N) store(to + i, E::load(from + i));
  if (i < count) {
    const V v = E::part(from + i, count - i);
    for (std::int64_t x = i; x < count; ++x) to[x] = v[x - i];
    i = count;
  }
  for (; i < padded; ++i) to[i] = 0.0f;
}

struct PagedWorkspace {
  float* scores;  // [48][128]
  float* sums;    // [48][width_v rounded up]
  float* query;   // [48][width]
  float* keys;    // [8][width][16]: 128 keys in panels, also of pairs
  float* rows;    // [16][width]: a panel's keys before they are packed
  float* values;  // [128][width_v rounded up]
  Bits* query16;  // [48][width, rounded up for pairs], for dot products of the half types
  Bits* weights;  // [48][128], as bfloat16
  float* token;   // [width or width_v, rounded up]: a new key or value
};

PagedWorkspace layout(const PagedAttention& p, char* memory, std::int64_t* size) {
  PagedWorkspace w{};
  std::int64_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    char* const part = memory == nullptr ? nullptr : memory + at;
    at += round_up(bytes, 64);
    return part;
  };
  const auto floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(count * 4)); };
  w.scores = floats(kPagedRows * kKeyBlock);
  w.sums = floats(kPagedRows * round_up(p.width_v, P));
  w.query = floats(kPagedRows * p.width);
  const std::int64_t padded = round_up(p.width, kAmxPadding);
  w.keys = floats(kKeyBlock * (p.width > padded / 2 ? p.width : padded / 2));
  w.rows = floats(P * p.width);
  w.values = floats(kKeyBlock * round_up(p.width_v, P));
  w.query16 = reinterpret_cast<Bits*>(take(kPagedRows * padded * 2));
  w.weights = reinterpret_cast<Bits*>(take(kPagedRows * kKeyBlock * 2));
  w.token = floats(round_up(p.width > p.width_v ? p.width : p.width_v, P));
  if (size != nullptr) *size = at;
  return w;
}

// A key's elements of one head; its block holds `block` of them one behind the other.
template <class T>
const T* key_at(const PagedAttention& p, std::int64_t sequence, std::int64_t head, std::int64_t j) {
  const std::int64_t page = p.block_table[sequence * p.table_columns + j / p.block];
  return static_cast<const T*>(p.pool) + page * p.pool_block + p.offset + (head * p.block + j % p.block) * p.width;
}
template <class T>
const T* value_at(const PagedAttention& p, std::int64_t sequence, std::int64_t head, std::int64_t j) {
  const std::int64_t page = p.block_table[sequence * p.table_columns + j / p.block];
  return static_cast<const T*>(p.pool) + page * p.pool_block + p.offset + p.kv_heads * p.block * p.width +
         (head * p.block + j % p.block) * p.width_v;
}
// The scales of keys, in a page of codes, of this head and position on; those of values follow after kv_heads · block.
const Bits* scales_at(const PagedAttention& p, std::int64_t sequence, std::int64_t head, std::int64_t j) {
  const std::int64_t page = p.block_table[sequence * p.table_columns + j / p.block];
  const std::int64_t data = p.kv_heads * p.block * (p.width + p.width_v);
  return reinterpret_cast<const Bits*>(static_cast<const char*>(p.pool) + page * p.pool_block + p.offset + data) +
         head * p.block + j % p.block;
}

}  // namespace
}  // namespace untorch::kernels::UNTORCH_ISA
