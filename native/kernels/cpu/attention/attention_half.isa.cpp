// Attention of one head and a block of queries in bfloat16 or float16; scores, softmax and sums are float32.
//
//   once a head                     K and V packed: pairs of bfloat16 for vdpbf16ps and AMX, else float32
//   for blocks of 48 queries        Q rows side by side, scaled scores, output block in L1
//     for blocks of 128 keys        S = scale·Q·Kᵀ, running softmax, P rounded to the pairs' type, O += P·V
//
// With vdpbf16ps the two GEMMs take half the time of float32, and the softmax, about 20 operations a score, becomes the
// larger part at width 32; with AMX, whose k is padded by zeros to whole steps, at every width. Nothing is converted
// outside the blocks, so memory sees 2 bytes an element.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention_bf16.h"
#include "kernels/cpu/attention/attention_levels.h"
#include "kernels/cpu/attention/soften_block.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using Bits = std::uint16_t;
using cpu::HalfAttention;
struct Workspace {
  std::uint32_t* pairs;  // of K or V, before they are widened; no block of queries reads it then
  void* keys;            // [ceil(keys/16)][pairs of width][16], pairs or twice as many floats
  void* values;          // [ceil(width/16)][pairs of keys][16], likewise
  void* query;           // [48][padded width]
  float* scores;         // [48][128]
  Bits* probabilities;   // [48][128], as bfloat16
  float* sums;           // [48][width rounded up]: the output before its division
};

// Of a k. AMX takes steps of 16.
constexpr std::int64_t pairs_of(std::int64_t k, HalfMath math) {
  return math == HalfMath::kAmx ? round_up(k, kAmxPadding) / 2 : (k + 1) / 2;
}

Workspace layout(const HalfAttention& p, HalfMath math, char* memory, std::size_t* size) {
  Workspace w{};
  std::size_t at = 0;
  const auto take = [&](std::int64_t bytes) -> void* {
    char* const part = memory == nullptr ? nullptr : memory + at;
    at += static_cast<std::size_t>(round_up(bytes, 64));
    return part;
  };
  const bool bf16 = math != HalfMath::kWidened;
  const std::int64_t element = bf16 ? 2 : 4;
  const std::int64_t keys = round_up(p.keys, P) * pairs_of(p.width, math) * 2;
  const std::int64_t values = round_up(p.width, P) * pairs_of(p.keys, math) * 2;
  w.scores = static_cast<float*>(take(kQueryBlock * kKeyBlock * 4));
  w.probabilities = static_cast<Bits*>(take(bf16 ? kQueryBlock * kKeyBlock * 2 : 0));
  w.sums = static_cast<float*>(take(kQueryBlock * round_up(p.width, P) * 4));
  w.query = take(kQueryBlock * round_up(p.width, kAmxPadding) * element);
  w.keys = take(keys * element);
  w.values = take(values * element);
  w.pairs = static_cast<std::uint32_t*>(take(bf16 ? 0 : (keys > values ? keys : values) * 2));
  if (size != nullptr) *size = at;
  return w;
}

// B [k, n] as the tiles read it.
template <HalfType H>
void pack(HalfMath math, std::int64_t k, std::int64_t n, MatrixRef<const Bits> b, std::uint32_t* pairs, void* to) {
  const std::int64_t count = pairs_of(k, math);
  if (math != HalfMath::kWidened) return pack_pairs(k, n, b, static_cast<std::uint32_t*>(to), count, count);
  pack_pairs(k, n, b, pairs);
  widen_panels<H>(pairs, (n + P - 1) / P, count * P, count, static_cast<float*>(to));
}

// C [rows, 16·panels] = A·B, or C += A·B, from the block of pairs [from, from + count) of each panel's `total`.
void multiply(HalfMath math, std::int64_t rows, std::int64_t panels, std::int64_t from, std::int64_t count,
              std::int64_t total, const void* a, std::int64_t lda, const void* b, bool accumulate, float* c,
              std::int64_t ldc) {
  if (math == HalfMath::kWidened) {
    Tile<float> tile{};
    tile.k = 2 * count, tile.a = static_cast<const float*>(a), tile.lda = lda;
    tile.b = static_cast<const float*>(b) + 2 * from * P, tile.row_step = P, tile.panel_step = 2 * total * P;
    tile.alpha = 1.0f, tile.beta = accumulate ? 1.0f : 0.0f, tile.c = c, tile.ldc = ldc;
    return run_tiles(tile, rows, panels);
  }
#if defined(__AVX512F__)
  multiply_pairs(math == HalfMath::kAmx, rows, panels, count, total, static_cast<const Bits*>(a), lda,
                 static_cast<const std::uint32_t*>(b) + from * P, accumulate, c, ldc);
#endif
}

template <HalfType H>
void finish(const HalfAttention& p, std::int64_t b, std::int64_t h, std::int64_t first, std::int64_t rows,
            std::int64_t visible, const float* sums, std::int64_t ldo, const float* maximum, const float* sum) {
  Bits* const out = p.out.data + b * p.out.batch_stride + h * p.out.head_stride + first * p.out.row_stride;
  float* const lse = p.logsumexp.data + b * p.logsumexp.batch_stride + h * p.logsumexp.head_stride;
  for (std::int64_t i = 0; i < rows; ++i) {
    Bits* const to = out + i * p.out.row_stride;
    const float inverse = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
    for (std::int64_t x = 0; x < p.width; x += N) {
      const V v = visible == 0 ? V{} : load(sums + i * ldo + x) * inverse;
      if (p.out.col_stride == 1 && x + N <= p.width) {
        store_half<H>(to + x, v);
        continue;
      }
      Bits part[N];
      store_half<H>(part, v);
      for (std::int64_t y = x; y < smaller(x + N, p.width); ++y) to[y * p.out.col_stride] = part[y - x];
    }
    lse[(first + i) * p.logsumexp.row_stride] =
        maximum[i] == kNone && sum[i] == 0.0f ? 0.0f : maximum[i] + __builtin_logf(sum[i]);
  }
}

template <HalfType H>
void block(const HalfAttention& p, HalfMath math, const Workspace& w, std::int64_t b, std::int64_t h,
           std::int64_t first) {
  const std::int64_t rows = smaller(kQueryBlock, p.queries - first), width = p.width, ldo = round_up(width, P);
  const std::int64_t ldq = round_up(width, kAmxPadding), width_pairs = pairs_of(width, math);
  const std::int64_t key_pairs = pairs_of(p.keys, math);
  const bool bf16 = math != HalfMath::kWidened;
  const Bits* const q = p.query.data + b * p.query.batch_stride + h * p.query.head_stride + first * p.query.row_stride;
  for (std::int64_t i = 0; i < rows; ++i) {
    const Bits* const row = q + i * p.query.row_stride;
    if (bf16) {
      copy_row(row, p.query.col_stride, width, 2 * width_pairs, static_cast<Bits*>(w.query) + i * ldq);
    } else {
      widen_row<H>(row, p.query.col_stride, width, 2 * width_pairs, static_cast<float*>(w.query) + i * ldq);
    }
  }
  const float* const mask =
      p.mask.data == nullptr ? nullptr : p.mask.data + b * p.mask.batch_stride + h * p.mask.head_stride;
  float maximum[kQueryBlock], sum[kQueryBlock];
  for (std::int64_t i = 0; i < rows; ++i) maximum[i] = kNone, sum[i] = 0.0f;
  const std::int64_t visible = p.causal ? smaller(p.keys, first + rows) : p.keys;
  const std::int64_t element = bf16 ? 2 : 4;
  for (std::int64_t j = 0; j < visible; j += kKeyBlock) {
    const std::int64_t cols = smaller(kKeyBlock, visible - j), padded = round_up(cols, P);
    const std::int64_t block_pairs = pairs_of(cols, math);
    const char* const keys = static_cast<const char*>(w.keys) + j * width_pairs * 2 * element;
    multiply(math, rows, padded / P, 0, width_pairs, width_pairs, w.query, ldq, keys, false, w.scores, kKeyBlock);
    for (std::int64_t i = 0; i < rows; ++i) {
      float* const row = w.scores + i * kKeyBlock;
      for (std::int64_t x = 0; x < padded; x += N) store(row + x, load(row + x) * p.scale);
    }
    soften_block(p, mask, first, rows, j, cols, w.scores, w.sums, ldo, maximum, sum);
#if defined(__AVX512F__)
    if (bf16) round_probabilities(rows, padded, 2 * block_pairs, w.scores, w.probabilities);
#endif
    const void* const probabilities = bf16 ? static_cast<const void*>(w.probabilities) : w.scores;
    multiply(math, rows, ldo / P, j / 2, block_pairs, key_pairs, probabilities, kKeyBlock, w.values, j > 0, w.sums,
             ldo);
  }
  finish<H>(p, b, h, first, rows, visible, w.sums, ldo, maximum, sum);
}

template <HalfType H>
void items(const HalfAttention& p, HalfMath math, std::int64_t first, std::int64_t last, const Workspace& w) {
  const std::int64_t blocks = (p.queries + kQueryBlock - 1) / kQueryBlock, group = p.heads / p.kv_heads;
  std::int64_t packed = -1;
  const AmxScope scope(math == HalfMath::kAmx);
  for (std::int64_t item = first; item < last; ++item) {
    const std::int64_t b = item / blocks / p.heads, h = item / blocks % p.heads, kv = h / group;
    if (packed != b * p.kv_heads + kv) {
      packed = b * p.kv_heads + kv;
      const Bits* const k = p.key.data + b * p.key.batch_stride + kv * p.key.head_stride;
      const Bits* const v = p.value.data + b * p.value.batch_stride + kv * p.value.head_stride;
      pack<H>(math, p.width, p.keys, {k, p.key.col_stride, p.key.row_stride}, w.pairs, w.keys);
      pack<H>(math, p.keys, p.width, {v, p.value.row_stride, p.value.col_stride}, w.pairs, w.values);
    }
    block<H>(p, math, w, b, h, item % blocks * kQueryBlock);
  }
}

}  // namespace

std::size_t attention_half_workspace(const HalfAttention& p, HalfMath math) {
  std::size_t size = 0;
  layout(p, math, nullptr, &size);
  return size;
}

void attention_half_items(const HalfAttention& p, HalfMath math, std::int64_t first, std::int64_t last,
                          void* workspace) {
  const Workspace w = layout(p, math, static_cast<char*>(workspace), nullptr);
  if (p.type == HalfType::kBFloat16) {
    items<HalfType::kBFloat16>(p, math, first, last, w);
  } else {
    items<HalfType::kFloat16>(p, math, first, last, w);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
