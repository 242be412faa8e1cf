// Paged attention of one item: FlashAttention's running softmax over pages, in float32.
//
//   for blocks of 128 keys          pages are multiples of 16 keys, so a panel of keys lies in one
//     S = scale·Q·Kᵀ                few rows: dot products on the pages; else K is packed into panels
//     softcap, ALiBi, mask          a row sees keys [low, high)
//     running softmax
//     O += P·V                      V is copied into one buffer, zeros where no key is
//
// With few rows it is bound by reading the pages once; with many by the FMAs.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/paged_levels.h"
#include "kernels/cpu/attention/softmax.h"
#include "kernels/cpu/gemm/gemm_half_dot.h"
#include "kernels/cpu/gemm/gemm_pack.h"
#include "kernels/paged_attention.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using Bits = std::uint16_t;
constexpr std::int64_t kDotRowsLimit = 8;

// What a page's elements are.
struct Float {
  using type = float;
  static V load(const float* p) { return UNTORCH_ISA::load(p); }
  static V part(const float* p, std::int64_t count) {
    float values[N] = {};
    for (std::int64_t i = 0; i < count; ++i) values[i] = p[i];
    return UNTORCH_ISA::load(values);
  }
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
  float* keys;    // [8][width][16]: 128 keys in panels
  float* rows;    // [16][width]: a panel's keys before they are packed
  float* values;  // [128][width_v rounded up]
  Bits* query16;  // [48][width], for dot products of the half types
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
  w.keys = floats(kKeyBlock * p.width);
  w.rows = floats(P * p.width);
  w.values = floats(kKeyBlock * round_up(p.width_v, P));
  w.query16 = reinterpret_cast<Bits*>(take(kPagedRows * p.width * 2));
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

// Dot products of up to four rows with four keys, `sums` [4][16].
void dots(Float, bool, std::int64_t rows, std::int64_t k, const float* a, const float* b, float* sums) {
  switch (rows) {
    case 1:
      return dot_tile<float, 1, 4>(k, 1.0f, a, k, b, k, 0.0f, sums, P, 1);
    case 2:
      return dot_tile<float, 2, 4>(k, 1.0f, a, k, b, k, 0.0f, sums, P, 1);
    case 3:
      return dot_tile<float, 3, 4>(k, 1.0f, a, k, b, k, 0.0f, sums, P, 1);
    default:
      return dot_tile<float, 4, 4>(k, 1.0f, a, k, b, k, 0.0f, sums, P, 1);
  }
}
template <HalfType H>
void dots(Half16<H>, bool bf16, std::int64_t rows, std::int64_t k, const Bits* a, const Bits* b, float* sums) {
  for (std::int64_t i = 0; i < rows;) {
    const std::int64_t step = rows - i >= kHalfDotRows ? kHalfDotRows : rows - i >= 2 ? 2 : 1;
    const HalfDots tile{k, a + i * k, k, b, k, sums + i * P};
    (step == kHalfDotRows ? half_dot_kernel<H, kHalfDotRows>(4, bf16)
     : step == 2          ? half_dot_kernel<H, 2>(4, bf16)
                          : half_dot_kernel<H, 1>(4, bf16))(tile);
    i += step;
  }
}

// scores[row][0 … cols) of the keys [j, j + cols), cols rounded up to 16: those behind are whatever lies there.
template <class E>
void score(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, bool bf16, std::int64_t rows,
           std::int64_t j, std::int64_t cols) {
  using T = typename E::type;
  if (rows <= kDotRowsLimit) {
    const T* query = nullptr;
    if constexpr (sizeof(T) == 4) {
      query = w.query;
    } else {
      query = w.query16;
    }
    for (std::int64_t x = 0; x < round_up(cols, 4); x += 4) {
      const T* const keys = key_at<T>(p, item.sequence, item.kv_head, j + x);
      for (std::int64_t i = 0; i < rows; i += 4) {
        alignas(64) float sums[4 * P] = {};
        const std::int64_t count = smaller(4, rows - i);
        dots(E{}, bf16, count, p.width, query + i * p.width, keys, sums);
        for (std::int64_t y = 0; y < count; ++y) {
          for (std::int64_t z = 0; z < 4; ++z) w.scores[(i + y) * kKeyBlock + x + z] = p.scale * sums[y * P + z];
        }
      }
    }
    return;
  }
  for (std::int64_t x = 0; x < cols; x += P) {
    const T* const keys = key_at<T>(p, item.sequence, item.kv_head, j + x);
    const float* rows_of = nullptr;
    if constexpr (sizeof(T) == 4) {
      rows_of = keys;
    } else {
      widen<E>(keys, P * p.width, P * p.width, w.rows);
      rows_of = w.rows;
    }
    pack_panel(p.width, P, rows_of, 1, p.width, w.keys + x * p.width);
  }
  Tile<float> tile{};
  tile.k = p.width, tile.a = w.query, tile.lda = p.width;
  tile.b = w.keys, tile.row_step = P, tile.panel_step = P * p.width;
  tile.alpha = p.scale, tile.c = w.scores, tile.ldc = kKeyBlock;
  run_tiles(tile, rows, round_up(cols, P) / P);
}

template <class E>
void item_of(const PagedAttention& p, const PagedItem& item, bool bf16, const PagedWorkspace& w) {
  using T = typename E::type;
  const std::int64_t group = p.heads / p.kv_heads, rows = item.count * group, ldo = round_up(p.width_v, P);
  const std::int64_t begin = p.cu_seqlens_q[item.sequence], end = p.cu_seqlens_q[item.sequence + 1];
  const std::int64_t length = p.seqlens_k[item.sequence];
  const std::int64_t position = length - (end - begin) + (item.query - begin);  // of the first query
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t head = item.kv_head * group + r % group;
    const T* const from = static_cast<const T*>(p.q) + (item.query + r / group) * p.q_token + head * p.q_head;
    widen<E>(from, p.width, p.width, w.query + r * p.width);
    if constexpr (sizeof(T) == 2) {
      for (std::int64_t x = 0; x < p.width; ++x) w.query16[r * p.width + x] = from[x];
    }
  }
  float maximum[kPagedRows], sum[kPagedRows];
  for (std::int64_t r = 0; r < rows; ++r) maximum[r] = kNone, sum[r] = 0.0f;
  for (std::int64_t x = 0; x < rows * ldo; ++x) w.sums[x] = 0.0f;
  for (std::int64_t j = item.key0; j < item.key1; j += kKeyBlock) {
    const std::int64_t cols = smaller(kKeyBlock, item.key1 - j), padded = round_up(cols, P);
    score<E>(p, item, w, bf16, rows, j, cols);
    for (std::int64_t r = 0; r < rows; ++r) {
      float* const row = w.scores + r * kKeyBlock;
      const std::int64_t i = position + r / group, head = item.kv_head * group + r % group;
      std::int64_t low = 0;
      if (p.window > 0 && i - p.window + 1 > low) low = i - p.window + 1;
      if (p.chunk > 0 && i / p.chunk * p.chunk > low) low = i / p.chunk * p.chunk;
      if (p.softcap != 0.0f) {
        for (std::int64_t x = 0; x < padded; x += N) {
          store(row + x, p.softcap * vecmath::vtanh(load(row + x) / p.softcap));
        }
      }
      if (p.alibi != nullptr) {
        for (std::int64_t x = 0; x < cols; ++x) row[x] += p.alibi[head] * static_cast<float>(j + x - i);
      }
      for (std::int64_t x = 0; x < smaller(low - j, padded); ++x) row[x] = kNone;
      const std::int64_t seen = i + 1 - j;
      for (std::int64_t x = seen > 0 ? seen : 0; x < padded; ++x) row[x] = kNone;
      const float factor = soften(row, padded, maximum[r], sum[r]);
      if (factor != 1.0f) {
        float* const o = w.sums + r * ldo;
        for (std::int64_t x = 0; x < ldo; x += N) store(o + x, load(o + x) * factor);
      }
    }
    for (std::int64_t x = 0; x < cols; ++x) {
      widen<E>(value_at<T>(p, item.sequence, item.kv_head, j + x), p.width_v, ldo, w.values + x * ldo);
    }
    Tile<float> pv{};
    pv.k = cols, pv.a = w.scores, pv.lda = kKeyBlock;
    pv.b = w.values, pv.row_step = ldo, pv.panel_step = P;
    pv.alpha = 1.0f, pv.beta = 1.0f, pv.c = w.sums, pv.ldc = ldo;
    run_tiles(pv, rows, ldo / P);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const o = w.sums + r * ldo;
    if (item.partial != nullptr) {
      float* const to = item.partial + r * (p.width_v + 2);
      for (std::int64_t x = 0; x < p.width_v; ++x) to[x] = o[x];
      to[p.width_v] = maximum[r], to[p.width_v + 1] = sum[r];
      continue;
    }
    const std::int64_t head = item.kv_head * group + r % group;
    const float sink = p.sinks == nullptr ? kNone : p.sinks[head];
    // With a sink the weights are scaled as if its logit had been seen.
    const float top = sink > maximum[r] ? sink : maximum[r];
    const float kept = maximum[r] == kNone ? 0.0f : exp_nonpositive(V{} + (maximum[r] - top))[0];
    const float total = sum[r] * kept + (sink == kNone ? 0.0f : exp_nonpositive(V{} + (sink - top))[0]);
    const float by = total == 0.0f ? 0.0f : kept / total;
    T* const out = static_cast<T*>(p.out) + ((item.query + r / group) * p.heads + head) * p.width_v;
    for (std::int64_t x = 0; x < p.width_v; x += N) E::put(out + x, load(o + x) * by, p.width_v - x);
  }
}

template <class E>
void join_of(const PagedAttention& p, const PagedItem& first, std::int64_t parts) {
  using T = typename E::type;
  const std::int64_t group = p.heads / p.kv_heads, rows = first.count * group, each = p.width_v + 2;
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t head = first.kv_head * group + r % group;
    const float sink = p.sinks == nullptr ? kNone : p.sinks[head];
    float top = sink;
    for (std::int64_t i = 0; i < parts; ++i) {
      const float own = first.partial[(i * rows + r) * each + p.width_v];
      top = own > top ? own : top;
    }
    float total = sink == kNone ? 0.0f : exp_nonpositive(V{} + (sink - top))[0];
    T* const out = static_cast<T*>(p.out) + ((first.query + r / group) * p.heads + head) * p.width_v;
    for (std::int64_t i = 0; i < parts; ++i) {
      const float* const part = first.partial + (i * rows + r) * each;
      if (part[p.width_v] != kNone) total += part[p.width_v + 1] * exp_nonpositive(V{} + (part[p.width_v] - top))[0];
    }
    const float by = total == 0.0f ? 0.0f : 1.0f / total;
    for (std::int64_t x = 0; x < p.width_v; x += N) {
      const std::int64_t left = p.width_v - x;
      V sum = V{};
      for (std::int64_t i = 0; i < parts; ++i) {
        const float* const part = first.partial + (i * rows + r) * each;
        if (part[p.width_v] == kNone) continue;
        const float factor = exp_nonpositive(V{} + (part[p.width_v] - top))[0];
        sum += (left >= N ? load(part + x) : Float::part(part + x, left)) * factor;
      }
      E::put(out + x, sum * by, left);
    }
  }
}

template <class T>
void write_of(const PagedAttention& p, std::int64_t t) {
  T* const out = static_cast<T*>(p.out) + t * p.heads * p.width_v;
  // Tokens behind the last sequence are padding.
  if (t >= p.cu_seqlens_q[p.sequences]) {
    for (std::int64_t x = 0; x < p.heads * p.width_v; ++x) out[x] = T(0);
  }
  if (p.k == nullptr || p.slots[t] < 0) return;
  T* const page = static_cast<T*>(p.pool) + p.slots[t] / p.block * p.pool_block + p.offset;
  const std::int64_t place = p.slots[t] % p.block;
  for (std::int64_t h = 0; h < p.kv_heads; ++h) {
    const T* const k = static_cast<const T*>(p.k) + t * p.k_token + h * p.k_head;
    const T* const v = static_cast<const T*>(p.v) + t * p.v_token + h * p.v_head;
    T* const key = page + (h * p.block + place) * p.width;
    T* const value = page + p.kv_heads * p.block * p.width + (h * p.block + place) * p.width_v;
    for (std::int64_t x = 0; x < p.width; ++x) key[x] = k[x];
    for (std::int64_t x = 0; x < p.width_v; ++x) value[x] = v[x];
  }
}

template <class Fn>
void dispatch(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kBFloat16:
      return fn(Half16<HalfType::kBFloat16>{});
    case DType::kFloat16:
      return fn(Half16<HalfType::kFloat16>{});
    default:
      return fn(Float{});
  }
}

}  // namespace

std::int64_t paged_workspace(const PagedAttention& p) {
  std::int64_t size = 0;
  layout(p, nullptr, &size);
  return size;
}

void paged_item(const PagedAttention& p, const PagedItem& item, bool bf16, void* workspace) {
  const PagedWorkspace w = layout(p, static_cast<char*>(workspace), nullptr);
  dispatch(p.dtype, [&]<class E>(E) { item_of<E>(p, item, bf16, w); });
}

void paged_join(const PagedAttention& p, const PagedItem& first, std::int64_t parts) {
  dispatch(p.dtype, [&]<class E>(E) { join_of<E>(p, first, parts); });
}

void paged_write(const PagedAttention& p, std::int64_t token) {
  dispatch(p.dtype, [&]<class E>(E) { write_of<typename E::type>(p, token); });
}

}  // namespace untorch::kernels::UNTORCH_ISA
