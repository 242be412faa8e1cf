// The serial drivers of the GEMM in bfloat16 and float16: sums in float32, operands widened in registers.
//
//   for columns in blocks of nc            B in panels of pairs: from the file, or packed here for all of k
//     for rows in blocks of mc             A block [mc, kc] in L2, float32 (bfloat16 for vdpbf16ps)
//       for k in blocks of kc
//         for tiles of NV panels           B tile [kc, NV·16] in L1, 2 bytes an element
//           for tiles of MR rows           the last block of k ends in the epilogue and the rounding
//
// At small M it is bound by reading B, half of what float32 reads; at large M by the FMA ports, with AVX512_BF16 by
// twice their rate, with AMX by sixteen times.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/common/amx.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_half_dot.h"
#include "kernels/cpu/gemm/gemm_half_micro.h"
#include "kernels/cpu/gemm/gemm_half_pack.h"
#include "kernels/cpu/gemm/gemm_levels.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using Bits = std::uint16_t;
constexpr int N = kLanes<float>;
constexpr std::int64_t P = kPackWidth;
constexpr std::int64_t kBlockK = 512, kFewRowsBlockK = 2048, kBlockM = 96, kBlockN = 512;
constexpr std::int64_t kWidenedBlockM = 240;    // rows that share panels which were widened for them
constexpr std::int64_t kAmxBlockM = 256;        // rows that share panels in L1, which AMX reads fastest from there
constexpr std::int64_t kPackedBytes = 1 << 20;  // of B that is packed at once
constexpr std::int64_t kPad = 32;               // elements after a row of A: neighbours start in different cache sets
constexpr std::int64_t kFewRows = 32;           // up to here dot products beat packing (measured, k = 384 to 2048)

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }
constexpr std::int64_t larger(std::int64_t x, std::int64_t y) { return x > y ? x : y; }

// Bias, residual, clamp and rounding of a tile of sums [rows, width] in one pass: the result's elements from (i, j) on.
template <HalfType H, bool kBias, bool kResidual>
void round_tile(const HalfResult& r, const float* bias, float low, float high, std::int64_t i, std::int64_t j,
                std::int64_t rows, std::int64_t width, const float* sums, std::int64_t ld) {
  using V = Vector<float>;
  const V least = V{} + low, most = V{} + high;
  const bool first = r.epilogue.residual_first;
  for (std::int64_t y = 0; y < rows; ++y, sums += ld) {
    Bits* const to = r.c + (i + y) * r.row_stride + j;
    [[maybe_unused]] const Bits* const added = kResidual ? r.residual + (i + y) * r.ldr + j : nullptr;
    const auto value = [&](std::int64_t x, V rest) __attribute__((always_inline)) {
      V v = load(sums + x);
      if constexpr (kBias) v += load(bias + x);
      if (kResidual && first) v += rest;
      v = vecmath::at_most(vecmath::at_least(v, least), most);
      return kResidual && !first ? v + rest : v;
    };
    const auto whole = [&](std::int64_t x) __attribute__((always_inline)) {
      return value(x, kResidual ? load_half<H>(added + x) : V{});
    };
    std::int64_t x = 0;
    for (; x + 2 * N <= width; x += 2 * N) store_two_halves<H>(to + x, whole(x), whole(x + N));
    if (x + N <= width) store_half<H>(to + x, whole(x)), x += N;
    if (const std::int64_t left = width - x; left > 0) {
      store_half_part<H>(to + x, value(x, kResidual ? load_half_part<H>(added + x, left) : V{}), left);
    }
  }
}

// A tile of sums [rows, width] becomes the result's elements from (i, j) on. bias: that of column j; may be null.
template <HalfType H>
void finish(const HalfResult& r, const float* bias, std::int64_t i, std::int64_t j, std::int64_t rows,
            std::int64_t width, float* sums, std::int64_t ld) {
  constexpr float kInfinity = __builtin_inff();
  const bool plain = r.beta == 0.0f && r.col_stride == 1, residual = r.residual != nullptr;
  const TileEpilogue inside = tile_epilogue({r.epilogue.activation}, false);
  if (plain && r.alpha == 1.0f && !inside.rest) {
    const auto round = bias != nullptr ? (residual ? round_tile<H, true, true> : round_tile<H, true, false>)
                                       : (residual ? round_tile<H, false, true> : round_tile<H, false, false>);
    return round(r, bias, inside.low, inside.high, i, j, rows, width, sums, ld);
  }
  if (r.alpha != 1.0f || bias != nullptr) {
    for (std::int64_t y = 0; y < rows; ++y) {
      for (std::int64_t x = 0; x < width; x += N) {
        Vector<float> v = load(sums + y * ld + x) * r.alpha;
        if (bias != nullptr) v += load(bias + x);
        store(sums + y * ld + x, v);
      }
    }
  }
  const auto add_residual = [&](std::int64_t y, std::int64_t x, Vector<float> & v) __attribute__((always_inline)) {
    const Bits* const from = r.residual + (i + y) * r.ldr + j + x;
    v += width - x >= N ? load_half<H>(from) : load_half_part<H>(from, width - x);
  };
  const bool before = residual && r.epilogue.residual_first, after = residual && !before;
  if (before) {
    for (std::int64_t y = 0; y < rows; ++y) {
      for (std::int64_t x = 0; x < width; x += N) {
        Vector<float> v = load(sums + y * ld + x);
        add_residual(y, x, v);
        store(sums + y * ld + x, v);
      }
    }
  }
  if (r.epilogue.activation != Activation::kNone) {
    apply_epilogue(rows, width, {r.epilogue.activation}, nullptr, 0, sums, ld);
  }
  if (plain) {
    const auto round = after ? round_tile<H, false, true> : round_tile<H, false, false>;
    return round(r, nullptr, -kInfinity, kInfinity, i, j, rows, width, sums, ld);
  }
  const bool dense = r.col_stride == 1;
  for (std::int64_t y = 0; y < rows; ++y) {
    Bits* const to = r.c + (i + y) * r.row_stride + j * r.col_stride;
    for (std::int64_t x = 0; x < width; x += N) {
      const std::int64_t left = smaller(N, width - x);
      Vector<float> v = load(sums + y * ld + x);
      if (after) add_residual(y, x, v);
      if (dense && left == N) {
        if (r.beta != 0.0f) v += load_half<H>(to + x) * r.beta;
        store_half<H>(to + x, v);
        continue;
      }
      Bits part[N] = {};
      if (r.beta != 0.0f) {
        for (std::int64_t z = 0; z < left; ++z) part[z] = to[(x + z) * r.col_stride];
        v += load_half<H>(part) * r.beta;
      }
      store_half<H>(part, v);
      for (std::int64_t z = 0; z < left; ++z) to[(x + z) * r.col_stride] = part[z];
    }
  }
}

// The bias of columns [j, j + count) as float32, with zeros up to a whole panel; null if there is none.
template <HalfType H>
const float* widen_bias(const HalfResult& r, std::int64_t j, std::int64_t count, float* to) {
  if (r.bias == nullptr) return nullptr;
  widen_row<H>(r.bias + j, 1, count, ceil_div(count, P) * P, to);
  return to;
}

// Rows of C without a k: alpha·0 and the epilogue.
template <HalfType H>
void finish_zeros(const HalfResult& r, std::int64_t m, std::int64_t n) {
  float zeros[kBlockN], wide[kBlockN];
  for (std::int64_t j = 0; j < n; j += kBlockN) {
    const std::int64_t width = smaller(kBlockN, n - j);
    const float* const bias = widen_bias<H>(r, j, width, wide);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t x = 0; x < ceil_div(width, N) * N; ++x) zeros[x] = 0.0f;
      finish<H>(r, bias, i, j, 1, width, zeros, kBlockN);
    }
  }
}

struct Workspace {
  float* sums;            // [mc, nc]
  float* bias;            // [nc]
  void* rows;             // [mc, kc + padding]
  float* wide;            // a tile's panels as float32, where several tiles of rows read them
  std::uint32_t* packed;  // for nc columns
};

constexpr std::int64_t kWidePanels = 4;  // at most, with more rows than a tile has

Workspace layout(const HalfPlan& p, std::int64_t k, bool packed, void* memory, std::size_t* size) {
  std::size_t at = 0;
  const auto take = [&](std::int64_t bytes) {
    char* const part = static_cast<char*>(memory) + at;
    at += static_cast<std::size_t>(ceil_div(bytes, 64) * 64);
    return memory == nullptr ? nullptr : part;
  };
  Workspace w{};
  w.sums = reinterpret_cast<float*>(take(p.mc * (p.nc + P) * 4));
  w.bias = reinterpret_cast<float*>(take((p.nc + P) * 4));
  w.rows = take(p.mc * (ceil_div(p.kc, 2) * 2 + kPad) * (p.bf16 ? 2 : 4));
  const std::int64_t wide = p.widens ? kWidePanels * P * ceil_div(p.kc, 2) * 2 : 0;
  w.wide = reinterpret_cast<float*>(take(wide * 4));
  w.packed = reinterpret_cast<std::uint32_t*>(take(packed ? 0 : ceil_div(p.nc, P) * P * ceil_div(k, 2) * 4));
  if (size != nullptr) *size = at;
  return w;
}

#if defined(__AVX512F__)
// A tile of up to 32 rows and two panels by AMX, what is left of k by vdpbf16ps. Rows of A and of C behind the tile's,
// up to a multiple of 16, are read and written.
void gemm_amx(const PairTile& t, int rows, int panels) {
  constexpr std::int64_t kStep = kAmxTileBytes / 4;  // pairs
  const std::int64_t steps = t.pairs / kStep;
  amx_gemm<AmxTiles, false>({.a = t.a,
                             .a_stride = t.lda * 2,
                             .b = t.b,
                             .panel_bytes = t.panel_step * 4,
                             .c = t.c,
                             .c_stride = t.ldc * 4,
                             .steps = steps,
                             .start = t.accumulate ? t.c : nullptr,
                             .start_stride = t.ldc * 4},
                            rows > kAmxRows ? 2 : 1, panels);
  if (steps * kStep == t.pairs) return;
  PairTile rest = t;
  rest.pairs = t.pairs - steps * kStep, rest.b = t.b + steps * kStep * P, rest.accumulate = true;
  for (int i = 0; i < rows; i += kMaxRows) {
    const int count = static_cast<int>(smaller(kMaxRows, rows - i));
    rest.a = static_cast<const Bits*>(t.a) + i * t.lda + steps * kStep * 2, rest.c = t.c + i * t.ldc;
    kDotBf16.kernel[count - 1][panels - 1](rest);
  }
}
#endif

template <HalfType H>
void packed_slice(const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const Bits> a,
                  const std::uint32_t* packed, const HalfResult& result, const Workspace& w) {
  const std::int64_t pairs = ceil_div(k, 2), ld = plan.nc + P;
  const PairTable* table = &kWidened<H>;
#if defined(__AVX512F__)
  if (plan.bf16) table = &kDotBf16;
#endif
  const AmxScope scope(plan.amx);
  for (std::int64_t jc = 0; jc < n; jc += plan.nc) {
    const std::int64_t nb = smaller(plan.nc, n - jc);
    const float* const bias = widen_bias<H>(result, jc, nb, w.bias);
    for (std::int64_t ic = 0; ic < m; ic += plan.mc) {
      const std::int64_t mb = smaller(plan.mc, m - ic);
      const std::int64_t tiles = ceil_div(mb, plan.rows);  // the first ones may have a row more than the others
      const int tile_m = static_cast<int>(plan.amx ? smaller(mb, plan.rows) : ceil_div(mb, tiles));
      const std::int64_t fuller = mb - tiles * (tile_m - 1);
      for (std::int64_t pc = 0; pc < k; pc += plan.kc) {
        const std::int64_t kb = smaller(plan.kc, k - pc), even = ceil_div(kb, 2) * 2, lda = even + kPad;
        const bool last = pc + kb >= k;
        for (std::int64_t i = 0; i < mb; ++i) {
          const Bits* const from = a.data + (ic + i) * a.row_stride + pc * a.col_stride;
          if (plan.bf16) {
            copy_row(from, a.col_stride, kb, even, static_cast<Bits*>(w.rows) + i * lda);
          } else {
            widen_row<H>(from, a.col_stride, kb, even, static_cast<float*>(w.rows) + i * lda);
          }
        }
        for (std::int64_t j = 0; j < nb;) {
          const std::int64_t panels = ceil_div(nb - j, P);
          const int group = plan.amx ? (panels > 1 ? 2 : 1) : choose_panels(tile_m, panels);
          const std::int64_t width = smaller(group * P, nb - j);
          PairTile tile{};
          tile.pairs = even / 2, tile.lda = lda, tile.ldc = ld, tile.accumulate = pc > 0;
          tile.b = packed + (jc + j) * pairs + pc / 2 * P, tile.panel_step = pairs * P;
          const bool wide = plan.widens && mb > tile_m;
          // While the last rows pass over a widened panel, the next one comes out of memory, as in packed_slice().
          const std::int64_t parts = tiles > 8 ? 8 : tiles > 4 ? 4 : tiles > 2 ? 2 : 1;
          const std::uint32_t* next = nullptr;
          if (!wide || group > 1) {
          } else if (j + width < nb) {
            next = tile.b + tile.panel_step;
          } else if (!last) {
            next = packed + jc * pairs + (pc + kb) / 2 * P;
          } else if (ic + mb < m) {
            next = packed + jc * pairs;
          } else if (jc + plan.nc < n) {
            next = packed + (jc + plan.nc) * pairs;
          }
          if (wide) widen_panels<H>(tile.b, group, tile.panel_step, tile.pairs, w.wide);
          for (std::int64_t i = 0, left = tiles; left > 0; --left) {
            const int rows =
                static_cast<int>(plan.amx ? smaller(tile_m, mb - i) : tile_m - (tiles - left < fuller ? 0 : 1));
            tile.a = plan.bf16 ? static_cast<const void*>(static_cast<Bits*>(w.rows) + i * lda)
                               : static_cast<const void*>(static_cast<float*>(w.rows) + i * lda);
            // One block of k needs no sums beyond its tile, which then stays in L1.
            tile.c = last && pc == 0 ? w.sums : w.sums + i * ld + j;
            if (wide) {
              Tile<float> plain{};
              plain.k = even, plain.a = static_cast<const float*>(tile.a), plain.lda = lda;
              plain.b = w.wide, plain.row_step = P, plain.panel_step = even * P;
              plain.alpha = 1.0f, plain.beta = tile.accumulate ? 1.0f : 0.0f, plain.c = tile.c, plain.ldc = ld;
              if (next != nullptr && i > 0 && left <= parts) {
                const std::uint32_t* const ahead = next + (parts - left) * (tile.pairs / parts) * P;
                plain.next_b = reinterpret_cast<const float*>(ahead);  // half as many lines as the widened panel has
                plain.next_step = P / 2 / parts;
              }
              kMicro<float>.kernel[rows - 1][group - 1](plain);
#if defined(__AVX512F__)
            } else if (plan.amx) {
              gemm_amx(tile, rows, group);
#endif
            } else {
              table->kernel[rows - 1][group - 1](tile);
            }
            if (last) finish<H>(result, bias == nullptr ? bias : bias + j, ic + i, jc + j, rows, width, tile.c, ld);
            i += rows;
          }
          j += width;
        }
      }
    }
  }
}

template <HalfType H>
void dot_slice(const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const Bits> a,
               MatrixRef<const Bits> b, const HalfResult& result) {
  for (std::int64_t j = 0; j < n;) {
    const std::int64_t cols = n - j >= 4 ? 4 : 1;
    for (std::int64_t i = 0; i < m;) {
      const std::int64_t rows = m - i >= kHalfDotRows ? kHalfDotRows : m - i >= 2 ? 2 : 1;
      alignas(64) float sums[kHalfDotRows * P] = {};
      const HalfDots tile{k, a.data + i * a.row_stride, a.row_stride, b.data + j * b.col_stride, b.col_stride, sums};
      (rows == kHalfDotRows ? half_dot_kernel<H, kHalfDotRows>(cols, plan.bf16)
       : rows == 2          ? half_dot_kernel<H, 2>(cols, plan.bf16)
                            : half_dot_kernel<H, 1>(cols, plan.bf16))(tile);
      finish<H>(result, nullptr, i, j, rows, cols, sums, P);
      i += rows;
    }
    j += cols;
  }
}

template <HalfType H>
void slice(const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const Bits> a,
           MatrixRef<const Bits> b, const HalfResult& result, void* workspace) {
  if (k == 0) return finish_zeros<H>(result, m, n);
  if (plan.dot) return dot_slice<H>(plan, m, n, k, a, b, result);
  const Workspace w = layout(plan, k, false, workspace, nullptr);
  for (std::int64_t jc = 0; jc < n; jc += plan.nc) {
    const std::int64_t nb = smaller(plan.nc, n - jc);
    MatrixRef<const Bits> part = b;
    part.data += jc * b.col_stride;
    pack_pairs(k, nb, part, w.packed);
    HalfResult columns = result;
    columns.c += jc * result.col_stride;
    packed_slice<H>(plan, m, nb, k, a, w.packed, columns, w);
  }
}

}  // namespace

HalfPlan plan_half(HalfType type, std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const Bits> a,
                   MatrixRef<const Bits> b, bool packed, bool bf16, bool amx, bool dots) {
  HalfPlan p{};
  const bool can_bf16 = type == HalfType::kBFloat16 && kLanes<float> == 16;
  p.dot = dots && !packed && a.col_stride == 1 && b.row_stride == 1 && (m <= kFewRows || n < 4);
  p.amx = amx && can_bf16 && !p.dot && m >= kAmxFewestRows && k >= kAmxTileBytes / 2;
  p.bf16 = p.amx || (bf16 && can_bf16);
  p.rows = p.amx ? kAmxBlock : kMaxRows;
  const std::int64_t limit = m <= kMaxRows ? kFewRowsBlockK : kBlockK;
  p.kc = k <= limit ? larger(k, 1) : ceil_div(ceil_div(k, ceil_div(k, limit)), 2) * 2;
  // In registers, bfloat16 takes a shift and a mask a vector: little for a tile of 12 rows, a third more work for 6.
  p.widens = m > kMaxRows && (type == HalfType::kFloat16 || kMaxRows < 12);
  p.mc = p.widens ? ceil_div(m, ceil_div(m, kWidenedBlockM)) : smaller(m, kBlockM);
  if (p.amx) {
    p.mc = smaller(ceil_div(m, p.rows) * p.rows, kAmxBlockM);
    if (k > limit) p.kc = ceil_div(p.kc, kAmxTileBytes / 2) * (kAmxTileBytes / 2);
  }
  const std::int64_t columns = packed ? kBlockN : larger(kPackedBytes / (larger(k, 1) * 2) / P * P, 64);
  p.nc = smaller(ceil_div(n, P) * P, smaller(columns, kBlockN));
  if (!p.dot) layout(p, k, packed, nullptr, &p.workspace);
  return p;
}

void slice_half(HalfType type, const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k,
                MatrixRef<const Bits> a, MatrixRef<const Bits> b, const HalfResult& result, void* workspace) {
  if (type == HalfType::kBFloat16) {
    slice<HalfType::kBFloat16>(plan, m, n, k, a, b, result, workspace);
  } else {
    slice<HalfType::kFloat16>(plan, m, n, k, a, b, result, workspace);
  }
}

void packed_slice_half(HalfType type, const HalfPlan& plan, std::int64_t m, std::int64_t n, std::int64_t k,
                       MatrixRef<const Bits> a, const std::uint32_t* packed, const HalfResult& result,
                       void* workspace) {
  const Workspace w = layout(plan, k, true, workspace, nullptr);
  if (type == HalfType::kBFloat16) {
    if (k == 0) return finish_zeros<HalfType::kBFloat16>(result, m, n);
    packed_slice<HalfType::kBFloat16>(plan, m, n, k, a, packed, result, w);
  } else {
    if (k == 0) return finish_zeros<HalfType::kFloat16>(result, m, n);
    packed_slice<HalfType::kFloat16>(plan, m, n, k, a, packed, result, w);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
