// The W4A8 linear layer's inner loops, by instruction-set level.
//
// A vector of words has as many columns as it has lanes, with eight k of each. Masked with 0x0f in every byte it is
// four k, shifted by 4 before that the other four: two vpdpbusd with four bytes of x in all lanes. After the 32 k of a
// part, four words, the sums become float32 and are multiplied by the scales of the part and of the group: 8 vpdpbusd,
// a conversion, a multiplication and an FMA for 32 k of a row and a vector of columns.
//
// A weight is scale·q + base with q from 0 to 15: base is multiplied by the sum of a group of x, once a group.
//
// Without VNNI, vpmaddubsw adds pairs in 16 bits, and the eight of a part are at most 8 · 2 · 15 · 127, which fits. So
// all levels have the same integers.
#include <cstdint>

#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/w4a8/w4a8_levels.h"
#include "kernels/cpu/w8a8/int8_round.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int kWidth = kLanes<float>;
constexpr int kPerPanel = 16 / kWidth;  // vectors
constexpr int kPart = kW4A8Part;
constexpr int kSteps = kPart / 8;
// Words that are prefetched ahead: a page.
constexpr int kAhead = 1024, kPartsAhead = kAhead / (16 * kSteps);

typedef std::int8_t SignedNarrow __attribute__((vector_size(kWidth)));
typedef std::int8_t LooseSignedNarrow __attribute__((vector_size(kWidth), aligned(1), may_alias));

// 32 values to bytes; gives their scale, and their sum times it.
void quantize_part(const float* x, std::int8_t* values, float& scale, float& sum) {
  Ints magnitude{};
#pragma GCC unroll 8
  for (int i = 0; i < kPart; i += kWidth) {
    const Ints bits = (Ints)load(x + i) & 0x7fffffff;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < kWidth; ++i) largest = magnitude[i] > largest ? magnitude[i] : largest;
  if (largest >= kInfinityBits) {
    for (int i = 0; i < kPart; ++i) values[i] = 0;
    scale = sum = __builtin_nanf("");
    return;
  }
  float most;
  __builtin_memcpy(&most, &largest, sizeof most);
  scale = most / 127.0f > kLeastScale ? most / 127.0f : kLeastScale;
  const float inverse = 1.0f / scale;
  Ints total{};
#pragma GCC unroll 8
  for (int i = 0; i < kPart; i += kWidth) {
    const Ints q = rounded(load(x + i) * inverse);
    total += q;
    *reinterpret_cast<LooseSignedNarrow*>(values + i) = (LooseSignedNarrow) __builtin_convertvector(q, SignedNarrow);
  }
  std::int32_t all = 0;
  for (int i = 0; i < kWidth; ++i) all += total[i];
  sum = scale * static_cast<float>(all);
}

// A vector of scales from `at` on.
template <ScaleType S>
[[gnu::always_inline]] inline V load_scales(const void* scales, std::int64_t at) {
  if constexpr (S == ScaleType::kFloat32) return load(static_cast<const float*>(scales) + at);
  constexpr HalfType kHalf = S == ScaleType::kBFloat16 ? HalfType::kBFloat16 : HalfType::kFloat16;
  return load_half<kHalf>(static_cast<const std::uint16_t*>(scales) + at);
}

// Adds the products of four k in every lane. Sums of a part are int32 with VNNI, pairs of int16 without it.
template <bool kVnni>
[[gnu::always_inline]] inline Ints add_products(Ints sum, Ints weights, const std::int8_t* x) {
  std::int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  const Ints a = Ints{} + four;
#if defined(__AVX512F__)
  if constexpr (kVnni) {
    // By name: an intrinsic could not be inlined into code of the level.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(a));
    return sum;
  }
  return (Ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)weights, (__m512i)a));
#elif defined(__AVX2__)
  if constexpr (kVnni) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(a));
    return sum;
  }
  return (Ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)weights, (__m256i)a));
#elif defined(__x86_64__)
  return (Ints)_mm_add_epi16((__m128i)sum, _mm_maddubs_epi16((__m128i)weights, (__m128i)a));
#else
  for (int shift = 0; shift < 32; shift += 8) sum += ((weights >> shift) & 0xff) * ((a << (24 - shift)) >> 24);
  return sum;
#endif
}

// The sums of a part in float32.
template <bool kVnni>
[[gnu::always_inline]] inline V to_float(Ints sum) {
#if defined(__x86_64__)
  if constexpr (!kVnni) sum = madd(sum, Ints{} + 0x00010001);
#endif
  return __builtin_convertvector(sum, V);
}

// What a kernel reads and writes: R rows of x, W vectors of columns.
struct W4A8Tile {
  const W4A8Linear* p;
  const std::int8_t* values;
  const float *scales, *sums;  // W4A8Rows
  std::int64_t panel;          // the first
  float* out;                  // [R][W · width], rows ldo apart
  std::int64_t ldo;
  bool alone;  // each panel is read once, in turn: hardware follows within a page, and needs the next one's first line
};

template <bool kVnni, ScaleType S, int R, int W>
[[gnu::noinline]] void multiply(const W4A8Tile& t) {
  const W4A8Linear& p = *t.p;
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group, parts_of_group = p.group / kPart;
  const std::int32_t* words[W];
  std::int64_t scale_at[W];
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) {
    const std::int64_t panel = t.panel + w / kPerPanel, within = w % kPerPanel * kWidth;
    words[w] = p.weight + panel * (p.k / 8) * 16 + within;
    scale_at[w] = panel * groups * 32 + within;
  }
  const Ints halves = Ints{} + 0x0f0f0f0f;
  V total[R][W] = {};
  std::int64_t part = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    V scale[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) {
      scale[w] = load_scales<S>(p.scales, scale_at[w] + g * 32);
      const V base = load_scales<S>(p.scales, scale_at[w] + g * 32 + 16) - 8.0f * scale[w];
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[r][w] += base * t.sums[r * groups + g];
    }
    for (std::int64_t end = part + parts_of_group; part < end; ++part) {
      Ints sum[R][W] = {};
      const std::int8_t* const x = t.values + part * kPart;
      // At the end of several panels the next words are those of as many panels behind them.
      const std::int64_t ahead = kAhead + (part + kPartsAhead < parts ? 0 : (W / kPerPanel - 1) * p.k * 2);
      if (!t.alone || part % kPartsAhead == 0) {
#pragma GCC unroll 8
        for (int w = 0; w < W; w += kPerPanel) {
          const std::int32_t* const from = words[w] + part * kSteps * 16 + ahead;
          __builtin_prefetch(from, 0, 3);
          if (t.alone) continue;
#pragma GCC unroll 4
          for (int step = 1; step < kSteps; ++step) __builtin_prefetch(from + step * 16, 0, 3);
        }
      }
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) {
          const std::int32_t* const from = words[w] + (part * kSteps + step) * 16;
          const Ints word = load_ints(from), low = word & halves, high = (word >> 4) & halves;
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            sum[r][w] = add_products<kVnni>(sum[r][w], low, x + r * p.k + step * 8);
            sum[r][w] = add_products<kVnni>(sum[r][w], high, x + r * p.k + step * 8 + 4);
          }
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const float row_scale = t.scales[r * parts + part];
#pragma GCC unroll 8
        for (int w = 0; w < W; ++w) total[r][w] += to_float<kVnni>(sum[r][w]) * (scale[w] * row_scale);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store(t.out + r * t.ldo + w * kWidth, total[r][w]);
  }
}

// Rows, and panels that go with them: two sums a row and vector stay in registers beside the weights.
#if defined(__AVX512F__)
constexpr int kMostRows = 6;
constexpr int panels_of(int rows) { return rows <= 2 ? 4 : 2; }
#elif defined(__AVX2__)
constexpr int kMostRows = 2;
constexpr int panels_of(int) { return 1; }
#else
constexpr int kMostRows = 1;
constexpr int panels_of(int) { return 1; }
#endif

using Kernel = void (*)(const W4A8Tile&);
struct Kernels {
  Kernel all, one;  // of panels_of(rows) panels, and of one
};

template <bool kVnni, ScaleType S, int R>
constexpr Kernels kernels_of() {
  return {multiply<kVnni, S, R, panels_of(R) * kPerPanel>, multiply<kVnni, S, R, kPerPanel>};
}

template <bool kVnni, ScaleType S>
Kernels kernels_for(int rows) {
  constexpr Kernels kTable[] = {
      kernels_of<kVnni, S, 1>(),
#if defined(__AVX2__)
      kernels_of<kVnni, S, 2>(),
#endif
#if defined(__AVX512F__)
      kernels_of<kVnni, S, 3>(), kernels_of<kVnni, S, 4>(), kernels_of<kVnni, S, 5>(), kernels_of<kVnni, S, 6>(),
#endif
  };
  return kTable[rows - 1];
}

template <bool kVnni>
Kernels kernels_for(ScaleType type, int rows) {
  switch (type) {
    case ScaleType::kBFloat16:
      return kernels_for<kVnni, ScaleType::kBFloat16>(rows);
    case ScaleType::kFloat16:
      return kernels_for<kVnni, ScaleType::kFloat16>(rows);
    case ScaleType::kFloat32:
      break;
  }
  return kernels_for<kVnni, ScaleType::kFloat32>(rows);
}

// The columns of a tile that exist, with the bias.
void write_rows(const W4A8Linear& p, const float* tile, std::int64_t ldo, std::int64_t row, int rows, std::int64_t col,
                std::int64_t columns) {
  for (int r = 0; r < rows; ++r) {
    float* const to = p.out + (row + r) * p.n + col;
    const float* const from = tile + r * ldo;
    if (p.bias == nullptr) {
      for (std::int64_t c = 0; c < columns; ++c) to[c] = from[c];
    } else {
      for (std::int64_t c = 0; c < columns; ++c) to[c] = from[c] + p.bias[col + c];
    }
  }
}

}  // namespace

void quantize_parts(const W4A8Linear& p, std::int64_t row, std::int64_t row_end, const W4A8Rows& rows) {
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group, parts_of_group = p.group / kPart;
  alignas(64) float padded[kPart];
  for (; row < row_end; ++row) {
    const float* const x = p.x + row * p.x_stride;
    float* const scales = rows.scales + row * parts;
    float* const sums = rows.sums + row * groups;
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t at = part * kPart, left = p.x_width - at;
      const float* from = x + at;
      if (left < kPart) {
        for (int i = 0; i < kPart; ++i) padded[i] = i < left ? from[i] : 0.0f;
        from = padded;
      }
      float sum;
      quantize_part(from, rows.values + row * p.k + at, scales[part], sum);
      float& group = sums[part / parts_of_group];
      group = part % parts_of_group == 0 ? sum : group + sum;
    }
  }
}

void w4a8_slice(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t row, std::int64_t row_end,
                std::int64_t panel, std::int64_t panel_end) {
  alignas(64) float tile[kMostRows * panels_of(1) * 16];
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group;
  const std::int64_t first = row, m = row_end - row;
  const bool alone = m == 1 || (m <= kMostRows && m * p.k < kFewRowBytes);
  // As many panels for all rows as the first of them take: a panel stays in L1 while rows pass.
  const std::int64_t most = alone ? 1 : panels_of(m < kMostRows ? static_cast<int>(m) : kMostRows);
  while (panel < panel_end) {
    const std::int64_t panels = panel_end - panel < most ? 1 : most;
    for (row = first; row < row_end; row += kMostRows) {
      const int count = row_end - row < kMostRows ? static_cast<int>(row_end - row) : kMostRows;
      const Kernels kernels = vnni ? kernels_for<true>(p.scale_type, count) : kernels_for<false>(p.scale_type, count);
      W4A8Tile t{&p,   rows.values + row * p.k, rows.scales + row * parts, rows.sums + row * groups, panel, tile, 0,
                 alone};
      for (std::int64_t done = 0; done < panels;) {
        const int at_once = panels - done < panels_of(count) ? 1 : panels_of(count);
        t.panel = panel + done, t.ldo = at_once * 16;
        (at_once == 1 ? kernels.one : kernels.all)(t);
        const std::int64_t col = t.panel * 16, left = p.n - col;
        write_rows(p, tile, t.ldo, row, count, col, left < t.ldo ? left : t.ldo);
        done += at_once;
      }
    }
    panel += panels;
  }
}

int w4a8_rows() { return kMostRows; }

}  // namespace untorch::kernels::UNTORCH_ISA
