// Attention of one head and a block of queries, on the GEMM's microkernels.
//
//   for blocks of 48 queries        Q in place, output block in L1
//     for blocks of 128 keys        S = scale·Q·Kᵀ [48, 128] in L1, K packed into panels once a head
//       running softmax             the old sums are scaled by exp(old maximum − new maximum)
//       O += P·V                    V in place where its rows are contiguous and a multiple of a panel
//
// 4·width operations a score against about 20 for its exponential: at width 32 a third of the time is softmax.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/attention/attention_levels.h"
#include "kernels/cpu/attention/soften_block.h"
#include "kernels/cpu/gemm/gemm_pack.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

struct Workspace {
  float* keys;    // [ceil(keys/16)][width][16]
  float* values;  // [ceil(width/16)][keys][16], unless V is read in place
  float* query;   // [48][width], unless Q is read in place
  float* scores;  // [48][128]
  float* sums;    // [48][width rounded up]: the output before its division
};

bool values_in_place(const cpu::Attention<float>& p) { return p.value.col_stride == 1 && p.width % P == 0; }

Workspace layout(const cpu::Attention<float>& p, float* memory, std::size_t* size) {
  Workspace w{};
  std::int64_t at = 0;
  const auto take = [&](float*& part, std::int64_t count) {
    part = memory == nullptr ? nullptr : memory + at;
    at += round_up(count, P);
  };
  take(w.scores, kQueryBlock * kKeyBlock);
  take(w.sums, kQueryBlock * round_up(p.width, P));
  take(w.query, p.query.col_stride == 1 ? 0 : kQueryBlock * p.width);
  take(w.keys, round_up(p.keys, P) * p.width);
  take(w.values, values_in_place(p) ? 0 : p.keys * round_up(p.width, P));
  if (size != nullptr) *size = static_cast<std::size_t>(at) * sizeof(float);
  return w;
}

void block(const cpu::Attention<float>& p, const Workspace& w, std::int64_t b, std::int64_t h, std::int64_t kv,
           std::int64_t first) {
  const std::int64_t rows = smaller(kQueryBlock, p.queries - first), width = p.width, ldo = round_up(width, P);
  const float* q = p.query.data + b * p.query.batch_stride + h * p.query.head_stride + first * p.query.row_stride;
  std::int64_t ldq = p.query.row_stride;
  if (p.query.col_stride != 1) {
    copy_rows(rows, width, q, p.query.row_stride, p.query.col_stride, w.query, width);
    q = w.query, ldq = width;
  }
  const float* const v = p.value.data + b * p.value.batch_stride + kv * p.value.head_stride;
  const float* const mask =
      p.mask.data == nullptr ? nullptr : p.mask.data + b * p.mask.batch_stride + h * p.mask.head_stride;
  float maximum[kQueryBlock], sum[kQueryBlock];
  for (std::int64_t i = 0; i < rows; ++i) maximum[i] = kNone, sum[i] = 0.0f;
  const std::int64_t visible = p.causal ? smaller(p.keys, first + rows) : p.keys;
  for (std::int64_t j = 0; j < visible; j += kKeyBlock) {
    const std::int64_t cols = smaller(kKeyBlock, visible - j), padded = round_up(cols, P);
    Tile<float> tile{};
    tile.k = width, tile.a = q, tile.lda = ldq;
    tile.b = w.keys + j * width, tile.row_step = P, tile.panel_step = P * width;
    tile.alpha = p.scale, tile.c = w.scores, tile.ldc = kKeyBlock;
    run_tiles(tile, rows, padded / P);
    soften_block(p, mask, first, rows, j, cols, w.scores, w.sums, ldo, maximum, sum);
    Tile<float> pv{};
    pv.k = cols, pv.a = w.scores, pv.lda = kKeyBlock;
    if (values_in_place(p)) {
      pv.b = v + j * p.value.row_stride, pv.row_step = p.value.row_stride, pv.panel_step = P;
    } else {
      pv.b = w.values + j * P, pv.row_step = P, pv.panel_step = P * p.keys;
    }
    pv.alpha = 1.0f, pv.beta = j == 0 ? 0.0f : 1.0f, pv.c = w.sums, pv.ldc = ldo;
    run_tiles(pv, rows, ldo / P);
  }
  float* const out = p.out.data + b * p.out.batch_stride + h * p.out.head_stride + first * p.out.row_stride;
  float* const lse = p.logsumexp.data + b * p.logsumexp.batch_stride + h * p.logsumexp.head_stride;
  for (std::int64_t i = 0; i < rows; ++i) {
    const float* const o = w.sums + i * ldo;
    float* const to = out + i * p.out.row_stride;
    const float inverse = sum[i] == 0.0f ? 0.0f : 1.0f / sum[i];
    std::int64_t x = 0;
    if (visible == 0) {
      for (; x < width; ++x) to[x * p.out.col_stride] = 0.0f;
    }
    if (p.out.col_stride == 1) {
      for (; x + N <= width; x += N) store(to + x, load(o + x) * inverse);
    }
    for (; x < width; ++x) to[x * p.out.col_stride] = o[x] * inverse;
    lse[(first + i) * p.logsumexp.row_stride] =
        maximum[i] == kNone && sum[i] == 0.0f ? 0.0f : maximum[i] + __builtin_logf(sum[i]);
  }
}

}  // namespace

std::size_t attention_workspace(const cpu::Attention<float>& p) {
  std::size_t size = 0;
  layout(p, nullptr, &size);
  return size;
}

void attention_items(const cpu::Attention<float>& p, std::int64_t first, std::int64_t last, void* workspace) {
  const Workspace w = layout(p, static_cast<float*>(workspace), nullptr);
  const std::int64_t blocks = (p.queries + kQueryBlock - 1) / kQueryBlock, group = p.heads / p.kv_heads;
  std::int64_t packed = -1;
  for (std::int64_t item = first; item < last; ++item) {
    const std::int64_t b = item / blocks / p.heads, h = item / blocks % p.heads, kv = h / group;
    if (packed != b * p.kv_heads + kv) {
      packed = b * p.kv_heads + kv;
      pack_panels(p.width, p.keys, p.key.data + b * p.key.batch_stride + kv * p.key.head_stride, p.key.col_stride,
                  p.key.row_stride, w.keys);
      if (!values_in_place(p)) {
        pack_panels(p.keys, p.width, p.value.data + b * p.value.batch_stride + kv * p.value.head_stride,
                    p.value.row_stride, p.value.col_stride, w.values);
      }
    }
    block(p, w, b, h, kv, item % blocks * kQueryBlock);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
