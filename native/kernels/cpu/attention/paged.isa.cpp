// Paged attention of one item: FlashAttention's running softmax over pages, in float32.
//
//   for blocks of 128 keys          pages are multiples of 16 keys, so a panel of keys lies in one
//     S = scale·Q·Kᵀ                few rows: dot products on the pages; else K is packed, bfloat16 in pairs
//     softcap, ALiBi, mask          a row sees keys [low, high)
//     running softmax
//     O += P·V                      few rows: from the pages; else V is copied to a buffer, zeros where no key is
//
// Pages of int8 or FP8 codes: the scale of a key goes into its scores, that of a value into its weights. With few rows
// it is bound by reading the pages once; with many by the FMAs; in bfloat16 vdpbf16ps halves them, and AMX leaves the
// softmax.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/paged_bf16.h"
#include "kernels/cpu/attention/paged_codes.h"
#include "kernels/cpu/attention/paged_levels.h"
#include "kernels/cpu/attention/softmax.h"
#include "kernels/cpu/gemm/gemm_half_dot.h"
#include "kernels/cpu/gemm/gemm_pack.h"
#include "kernels/paged_attention.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t kDotRowsLimit = 8;
constexpr std::int64_t kKeysAhead = 32;  // two of the smallest pages

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

template <class S>
  requires kIsCodes<S>
void dots(S, bool, std::int64_t rows, std::int64_t k, const float* a, const std::int8_t* b, float* sums) {
  code_dots<S>(rows, k, a, b, sums);
}

// Few rows wait for the memory: the hardware follows a page, but does not know where the next one lies.
[[gnu::always_inline]] inline void prefetch(const void* from, std::int64_t bytes) {
  for (std::int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

// scores[row][0 … cols) of the keys [j, j + cols), cols rounded up to 16: those behind are whatever lies there.
template <class S>
void score(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, bool bf16, std::int64_t rows,
           std::int64_t j, std::int64_t cols) {
  using T = typename S::type;
  if (rows <= kDotRowsLimit) {
    const auto* const query = [&] {
      if constexpr (sizeof(T) == 2) {
        return w.query16;
      } else {
        return w.query;
      }
    }();
    for (std::int64_t x = 0; x < round_up(cols, 4); x += 4) {
      const T* const keys = key_at<T>(p, item.sequence, item.kv_head, j + x);
      prefetch(value_at<T>(p, item.sequence, item.kv_head, j + x), 4 * p.width_v * std::int64_t{sizeof(T)});
      if (j + x + kKeysAhead < item.key1) {
        const T* const next = key_at<T>(p, item.sequence, item.kv_head, j + x + kKeysAhead);
        prefetch(next, 4 * p.width * std::int64_t{sizeof(T)});
      }
      for (std::int64_t i = 0; i < rows; i += 4) {
        alignas(64) float sums[4 * P] = {};
        const std::int64_t count = smaller(4, rows - i);
        dots(S{}, bf16, count, p.width, query + i * p.width, keys, sums);
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
      widen<S>(keys, P * p.width, P * p.width, w.rows);
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

// Calls fn with what q, k, v and the result are.
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

// The queries of an item, in float32 and, of a half type, as they are with zeros up to `padded`.
template <class E>
void load_queries(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, std::int64_t padded) {
  using T = typename E::type;
  const std::int64_t group = p.heads / p.kv_heads;
  for (std::int64_t r = 0; r < item.count * group; ++r) {
    const std::int64_t head = item.kv_head * group + r % group;
    const T* const from = static_cast<const T*>(p.q) + (item.query + r / group) * p.q_token + head * p.q_head;
    widen<E>(from, p.width, p.width, w.query + r * p.width);
    if constexpr (sizeof(T) == 2) {
      copy_row(from, 1, p.width, padded, w.query16 + r * padded);
    }
  }
}

// `count` rows of scores or weights, times the scales of the keys [j, j + cols) or, behind them, of their values.
template <class S>
void apply_scales(const PagedAttention& p, const PagedItem& item, std::int64_t count, std::int64_t j, std::int64_t cols,
                  bool of_values, float* rows) {
  for (std::int64_t x = 0; x < cols; x += P) {
    const Bits* from = scales_at(p, item.sequence, item.kv_head, j + x);
    if (of_values) from += p.kv_heads * p.block;
    for (std::int64_t y = 0; y < P; y += N) {
      const V scales = load_half<HalfType::kBFloat16>(from + y) * S::kUnit;
      for (std::int64_t r = 0; r < count; ++r) {
        float* const at = rows + r * kKeyBlock + x + y;
        store(at, load(at) * scales);
      }
    }
  }
}

// Weights times the values of the keys [j, j + cols) to the sums of a few rows, straight from the pages.
template <class S>
void add_values(const PagedAttention& p, const PagedItem& item, const PagedWorkspace& w, std::int64_t rows,
                std::int64_t j, std::int64_t cols, std::int64_t ld) {
  for (std::int64_t x = 0; x < cols; x += P) {
    const auto* const values = value_at<typename S::type>(p, item.sequence, item.kv_head, j + x);
    add_rows<S>(rows, smaller(P, cols - x), w.scores + x, kKeyBlock, values, p.width_v, w.sums, ld);
  }
}

template <class S>
void item_of(const PagedAttention& p, const PagedItem& item, bool bf16, bool amx, const PagedWorkspace& w) {
  using T = typename S::type;
  const std::int64_t group = p.heads / p.kv_heads, rows = item.count * group, ldo = round_up(p.width_v, P);
  const std::int64_t begin = p.cu_seqlens_q[item.sequence], end = p.cu_seqlens_q[item.sequence + 1];
  const std::int64_t length = p.seqlens_k[item.sequence];
  const std::int64_t position = length - (end - begin) + (item.query - begin);  // of the first query
  const bool tiles = kIsBFloat16<S> && amx && rows >= kAmxFewestPagedRows;
  const bool pairs = tiles || (kIsBFloat16<S> && bf16 && rows > kDotRowsLimit);
  const std::int64_t ldq = pairs ? round_up(p.width, kAmxPadding) : p.width;
  dispatch(p.dtype, [&]<class E>(E) { load_queries<E>(p, item, w, ldq); });
  const AmxScope scope(tiles);
  float maximum[kPagedRows], sum[kPagedRows];
  for (std::int64_t r = 0; r < rows; ++r) maximum[r] = kNone, sum[r] = 0.0f;
  for (std::int64_t x = 0; x < rows * ldo; ++x) w.sums[x] = 0.0f;
  for (std::int64_t j = item.key0; j < item.key1; j += kKeyBlock) {
    const std::int64_t cols = smaller(kKeyBlock, item.key1 - j), padded = round_up(cols, P);
#if defined(__AVX512F__)
    pairs ? score_pairs(p, item, w, tiles, rows, j, cols) : score<S>(p, item, w, bf16, rows, j, cols);
#else
    score<S>(p, item, w, bf16, rows, j, cols);
#endif
    if constexpr (kIsCodes<S>) apply_scales<S>(p, item, rows, j, cols, false, w.scores);
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
    if constexpr (kIsCodes<S>) apply_scales<S>(p, item, rows, j, cols, true, w.scores);
    if (rows <= kDotRowsLimit) {
      add_values<S>(p, item, w, rows, j, cols, ldo);
      continue;
    }
#if defined(__AVX512F__)
    if (pairs) {
      add_value_pairs(p, item, w, tiles, rows, j, cols, ldo);
      continue;
    }
#endif
    for (std::int64_t x = 0; x < cols; ++x) {
      widen<S>(value_at<T>(p, item.sequence, item.kv_head, j + x), p.width_v, ldo, w.values + x * ldo);
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
    const std::int64_t at = ((item.query + r / group) * p.heads + head) * p.width_v;
    dispatch(p.dtype, [&]<class E>(E) {
      auto* const out = static_cast<typename E::type*>(p.out) + at;
      for (std::int64_t x = 0; x < p.width_v; x += N) E::put(out + x, load(o + x) * by, p.width_v - x);
    });
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

// A new token's k and v to its place in the pool.
template <class E, class S>
void write_of(const PagedAttention& p, std::int64_t t, const PagedWorkspace& w) {
  using T = typename E::type;
  using Stored = typename S::type;
  const std::int64_t place = p.slots[t] % p.block, data = p.kv_heads * p.block * (p.width + p.width_v);
  Stored* const page = static_cast<Stored*>(p.pool) + p.slots[t] / p.block * p.pool_block + p.offset;
  for (std::int64_t h = 0; h < p.kv_heads; ++h) {
    const std::int64_t row = h * p.block + place;
    const T* const k = static_cast<const T*>(p.k) + t * p.k_token + h * p.k_head;
    const T* const v = static_cast<const T*>(p.v) + t * p.v_token + h * p.v_head;
    Stored* const key = page + row * p.width;
    Stored* const value = page + p.kv_heads * p.block * p.width + row * p.width_v;
    if constexpr (kIsCodes<S>) {
      Bits* const scales = reinterpret_cast<Bits*>(page + data) + row;
      widen<E>(k, p.width, round_up(p.width, N), w.token);
      scales[0] = quantize_row<S>(w.token, p.width, key);
      widen<E>(v, p.width_v, round_up(p.width_v, N), w.token);
      scales[p.kv_heads * p.block] = quantize_row<S>(w.token, p.width_v, value);
    } else {
      for (std::int64_t x = 0; x < p.width; ++x) key[x] = k[x];
      for (std::int64_t x = 0; x < p.width_v; ++x) value[x] = v[x];
    }
  }
}

// Calls fn with what the pool holds.
template <class Fn>
void dispatch_pool(const PagedAttention& p, Fn&& fn) {
  switch (p.pool_dtype) {
    case DType::kInt8:
      return fn(Int8{});
    case DType::kFloat8E4M3FN:
      return fn(Fp8{});
    default:
      return dispatch(p.dtype, fn);
  }
}

}  // namespace

std::int64_t paged_workspace(const PagedAttention& p) {
  std::int64_t size = 0;
  layout(p, nullptr, &size);
  return size;
}

void paged_item(const PagedAttention& p, const PagedItem& item, bool bf16, bool amx, void* workspace) {
  const PagedWorkspace w = layout(p, static_cast<char*>(workspace), nullptr);
  dispatch_pool(p, [&]<class S>(S) { item_of<S>(p, item, bf16, amx, w); });
}

void paged_join(const PagedAttention& p, const PagedItem& first, std::int64_t parts) {
  dispatch(p.dtype, [&]<class E>(E) { join_of<E>(p, first, parts); });
}

void paged_write(const PagedAttention& p, std::int64_t token, void* workspace) {
  const PagedWorkspace w = layout(p, static_cast<char*>(workspace), nullptr);
  dispatch(p.dtype, [&]<class E>(E) {
    // Tokens behind the last sequence are padding.
    if (token >= p.cu_seqlens_q[p.sequences]) {
      auto* const out = static_cast<typename E::type*>(p.out) + token * p.heads * p.width_v;
      for (std::int64_t x = 0; x < p.heads * p.width_v; ++x) out[x] = 0;
    }
    if (p.k == nullptr || p.slots[token] < 0) return;
    if (p.pool_dtype == DType::kInt8) return write_of<E, Int8>(p, token, w);
    if (p.pool_dtype == DType::kFloat8E4M3FN) return write_of<E, Fp8>(p, token, w);
    write_of<E, E>(p, token, w);
  });
}

}  // namespace untorch::kernels::UNTORCH_ISA
