// The gated delta rule of one value head of one sequence, token by token, in float32.
//
//   for chunks of 16 tokens      q, k, k·exp(g) and exp(g) as rows [width] of a token
//     for tiles of 32 columns    S [width, 32] lies in L1; columns of S do not depend on each other
//       for tokens               change = beta·(v − read); one pass over S:
//                                S = exp(g)·S + k ⊗ change; out = qᵀ S; the next token's read = (k·exp(g))ᵀ S
//
// A prompt is bound by that pass, one load, one store and four FMAs an element of S and token in L1; a token of many
// sequences by reading and writing their states once.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/common/elements.h"
#include "kernels/cpu/linear_attention/linear_attention_levels.h"
#include "kernels/cpu/vecmath/inline.h"
#include "kernels/linear_attention.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr std::int64_t N = kLanes<float>;
constexpr std::int64_t kTokens = 16;
constexpr std::int64_t kColumns = kStateColumns;
constexpr int kVectors = static_cast<int>(kColumns / N);  // of a row of a tile
constexpr int kRows = N >= 16 ? 2 : 1;  // with sums of their own: eight chains of FMAs hide their latency

constexpr std::int64_t round_up(std::int64_t x) { return (x + N - 1) / N * N; }

struct Workspace {
  float *q, *k, *kept, *decay;  // [16][width rounded up]; kept: k·exp(g)
  float* tile;                  // [width][32]
  float* state;                 // [width][width_v], of a sequence without a slot
};

Workspace layout(const GatedDeltaRule& p, float* memory, std::int64_t* size) {
  std::int64_t at = 0;
  const auto take = [&](std::int64_t count) {
    float* const part = memory == nullptr ? nullptr : memory + at;
    at += (count + 15) / 16 * 16;
    return part;
  };
  const std::int64_t rows = kTokens * round_up(p.width);
  const Workspace w{
      take(rows), take(rows), take(rows), take(rows), take(p.width * kColumns), take(p.width * p.width_v)};
  if (size != nullptr) *size = at * 4;
  return w;
}

float sum_of(V v) {
  float sum = 0.0f;
  for (std::int64_t i = 0; i < N; ++i) sum += v[i];
  return sum;
}

// A row of q or k, times `scale` and, if `norm`, divided by its length.
template <class E>
void prepare_row(const typename E::type* from, std::int64_t width, bool norm, float scale, float* to) {
  V squares{};
  for (std::int64_t i = 0; i < width; i += N) {
    const V x = E::part(from + i, width - i);
    squares += x * x;
    store(to + i, x);
  }
  if (norm) scale *= 1.0f / __builtin_sqrtf(sum_of(squares) + kDeltaRuleNormEpsilon);
  for (std::int64_t i = 0; i < width; i += N) store(to + i, load(to + i) * scale);
}

template <class E>
void prepare(const GatedDeltaRule& p, std::int64_t token, std::int64_t head, std::int64_t at, const Workspace& w) {
  using T = typename E::type;
  const std::int64_t own = head / (p.heads / p.heads_k), row = at * round_up(p.width);
  prepare_row<E>(static_cast<const T*>(p.q) + token * p.q_token + own * p.q_head, p.width, p.l2norm, p.scale,
                 w.q + row);
  prepare_row<E>(static_cast<const T*>(p.k) + token * p.k_token + own * p.k_head, p.width, p.l2norm, 1.0f, w.k + row);
  const float* const g = p.g + (token * p.heads + head) * p.g_width;
  const V all = vecmath::vexp(V{} + g[0]);
  for (std::int64_t i = 0; i < p.width; i += N) {
    const V decay = p.g_width == 1 ? all : vecmath::vexp(FloatElements::part(g + i, p.width - i));
    store(w.decay + row + i, decay);
    store(w.kept + row + i, decay * load(w.k + row + i));
  }
}

// What a token reads of the state before it: (k·exp(g))ᵀ S.
void read_state(std::int64_t width, const float* kept, const float* tile, V* read) {
  V sums[kVectors] = {};
  for (std::int64_t i = 0; i < width; ++i) {
#pragma GCC unroll 8
    for (int x = 0; x < kVectors; ++x) sums[x] += load(tile + i * kColumns + x * N) * kept[i];
  }
#pragma GCC unroll 8
  for (int x = 0; x < kVectors; ++x) read[x] = sums[x];
}

// One token of one tile: S = exp(g)·S + k ⊗ change and out = qᵀ S, and on the way what the next token reads of S, if
// kDelta. kRowDecay: each row has its own.
template <bool kDelta, bool kRowDecay>
void step(std::int64_t width, const float* q, const float* k, const float* decay, const float* next_kept, float* tile,
          const V* change_of, V* out, V* read) {
  V change[kVectors];
#pragma GCC unroll 8
  for (int x = 0; x < kVectors; ++x) change[x] = change_of[x];
  V sums[kRows][kVectors] = {}, reads[kRows][kVectors] = {};
  const V all = V{} + decay[0];
  const auto row = [&](std::int64_t i, V * sum, V * own_read) __attribute__((always_inline)) {
    const V rate = kRowDecay ? V{} + decay[i] : all;
#pragma GCC unroll 8
    for (int x = 0; x < kVectors; ++x) {
      float* const s = tile + i * kColumns + x * N;
      const V next = load(s) * rate + change[x] * k[i];
      store(s, next);
      sum[x] += next * q[i];
      if constexpr (kDelta) own_read[x] += next * next_kept[i];
    }
  };
  std::int64_t i = 0;
  for (; i + kRows <= width; i += kRows) {
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) row(i + r, sums[r], reads[r]);
  }
  for (; i < width; ++i) row(i, sums[0], reads[0]);
#pragma GCC unroll 8
  for (int x = 0; x < kVectors; ++x) {
#pragma GCC unroll 4
    for (int r = 1; r < kRows; ++r) sums[0][x] += sums[r][x], reads[0][x] += reads[r][x];
    out[x] = sums[0][x];
    if constexpr (kDelta) read[x] = reads[0][x];
  }
}

template <class E>
void item_of(const GatedDeltaRule& p, std::int64_t sequence, std::int64_t head, std::int64_t low, std::int64_t high,
             float* memory) {
  using T = typename E::type;
  const Workspace w = layout(p, memory, nullptr);
  const std::int64_t begin = p.pool.begin(sequence), end = p.pool.end(sequence), stride = round_up(p.width);
  float* const kept = p.pool.state(sequence);
  float* const state = kept == nullptr ? w.state : kept + head * p.width * p.width_v;
  const bool begins = kept == nullptr || p.pool.begins(sequence);
  for (std::int64_t first = begin; first < end; first += kTokens) {
    const std::int64_t tokens = end - first < kTokens ? end - first : kTokens;
    for (std::int64_t t = 0; t < tokens; ++t) prepare<E>(p, first + t, head, t, w);
    for (std::int64_t column = low; column < high; column += kColumns) {
      const std::int64_t left = p.width_v - column;
      const auto each_vector = [&](auto&& fn) {
        for (std::int64_t i = 0; i < p.width; ++i) {
          for (std::int64_t x = 0; x < kColumns; x += N) {
            fn(w.tile + i * kColumns + x, state + i * p.width_v + column + x, left - x);
          }
        }
      };
      if (begins && first == begin) {
        for (std::int64_t i = 0; i < p.width * kColumns; i += N) store(w.tile + i, V{});
      } else {
        each_vector([](float* tile, const float* row, std::int64_t count) {
          store(tile, count > 0 ? FloatElements::part(row, count) : V{});
        });
      }
      V read[kVectors];
      if (p.beta != nullptr) read_state(p.width, w.kept, w.tile, read);
      for (std::int64_t t = 0; t < tokens; ++t) {
        const std::int64_t token = first + t, row = t * stride;
        const T* const from = static_cast<const T*>(p.v) + token * p.v_token + head * p.v_head + column;
        T* const to = static_cast<T*>(p.out) + (token * p.heads + head) * p.width_v + column;
        // The last token of the chunk reads for nobody: the next chunk's rows are not there yet.
        const float* const next_kept = w.kept + (t + 1 < tokens ? row + stride : row);
        V change[kVectors], out[kVectors];
        for (int x = 0; x < kVectors; ++x) change[x] = left > x * N ? E::part(from + x * N, left - x * N) : V{};
        if (p.beta != nullptr) {
          const float beta = p.beta[token * p.heads + head];
          for (int x = 0; x < kVectors; ++x) change[x] = (change[x] - read[x]) * beta;
        }
        const auto run = p.beta != nullptr ? (p.g_width == 1 ? step<true, false> : step<true, true>)
                                           : (p.g_width == 1 ? step<false, false> : step<false, true>);
        run(p.width, w.q + row, w.k + row, w.decay + row, next_kept, w.tile, change, out, read);
        for (int x = 0; x < kVectors; ++x) {
          if (left > x * N) E::put(to + x * N, out[x], left - x * N);
        }
      }
      each_vector([](const float* tile, float* row, std::int64_t count) {
        if (count > 0) FloatElements::put(row, load(tile), count);
      });
    }
  }
}

}  // namespace

std::int64_t delta_rule_workspace(const GatedDeltaRule& p) {
  std::int64_t size = 0;
  layout(p, nullptr, &size);
  return size;
}

void delta_rule_item(const GatedDeltaRule& p, std::int64_t sequence, std::int64_t head, std::int64_t begin,
                     std::int64_t end, void* workspace) {
  with_elements(p.dtype,
                [&]<class E>(E) { item_of<E>(p, sequence, head, begin, end, static_cast<float*>(workspace)); });
}

}  // namespace untorch::kernels::UNTORCH_ISA
