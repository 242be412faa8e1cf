// The W4A8 linear layer's inner loops, by instruction-set level.
//
// A vector of words has as many columns as it has lanes, with eight k of each. Masked with 0x0f in every byte it is
// four k, shifted by 4 before that the other four: two vpdpbusd with four bytes of x in all lanes. After the 32 k of a
// part, four words, the sums become float32 and are multiplied by the scales of the part and of the group: 8 vpdpbusd,
// a conversion, a multiplication and an FMA for 32 k of a row and a vector of columns.
//
// A weight of int4 is scale·q + base with q from 0 to 15: base is multiplied by the sum of a group of x, once a group.
//
// The 16 codes of NVFP4 become bytes by a shuffle: 12 + 2·e2m1, from 0 to 24. The 12 is taken back in integers, by the
// sum of a block of 16 of x: 4 vpdpbusd, 4 shuffles, a conversion, a multiplication and an FMA for 16 k.
//
// Without VNNI, vpmaddubsw adds pairs in 16 bits: the eight of a part are at most 8 · 2 · 15 · 127, the four of a block
// at most 4 · 2 · 24 · 127, which fit. So all levels have the same integers.
#include <cstdint>

#include "kernels/cpu/w4a8/w4a8_levels.h"
#include "kernels/cpu/w4a8/w4a8_weights.h"
#include "kernels/cpu/w8a8/int8_round.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int kWidth = kLanes<float>;
constexpr int kPerPanel = 16 / kWidth;  // vectors
constexpr int kPart = kW4A8Part;
constexpr int kBlock = kNvfp4Block;
constexpr int kSteps = kPart / 8;
// Words that are prefetched ahead: a page.
constexpr int kAhead = 1024, kPartsAhead = kAhead / (16 * kSteps);

typedef std::int8_t SignedNarrow __attribute__((vector_size(kWidth)));
typedef std::int8_t LooseSignedNarrow __attribute__((vector_size(kWidth), aligned(1), may_alias));

// 32 values to bytes; gives their scale, and sums of their halves, in lanes.
[[gnu::always_inline]] inline void quantize_part(const float* x, std::int8_t* values, float& scale, Ints (&sums)[2]) {
  Ints magnitude{};
#pragma GCC unroll 8
  for (int i = 0; i < kPart; i += kWidth) {
    const Ints bits = (Ints)load(x + i) & 0x7fffffff;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < kWidth; ++i) largest = magnitude[i] > largest ? magnitude[i] : largest;
  sums[0] = sums[1] = Ints{};
  if (largest >= kInfinityBits) {
    for (int i = 0; i < kPart; ++i) values[i] = 0;
    scale = __builtin_nanf("");
    return;
  }
  float most;
  __builtin_memcpy(&most, &largest, sizeof most);
  scale = most / 127.0f > kLeastScale ? most / 127.0f : kLeastScale;
  const float inverse = 1.0f / scale;
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
    for (int i = half * kBlock; i < (half + 1) * kBlock; i += kWidth) {
      const Ints q = rounded(load(x + i) * inverse);
      sums[half] += q;
      *reinterpret_cast<LooseSignedNarrow*>(values + i) = (LooseSignedNarrow) __builtin_convertvector(q, SignedNarrow);
    }
  }
}

[[gnu::always_inline]] inline std::int32_t sum_of_lanes(Ints v) {
  std::int32_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += v[i];
  return sum;
}

// Four neighbours of x, in every lane.
[[gnu::always_inline]] inline Ints load_four(const std::int8_t* x) {
  std::int32_t four;
  __builtin_memcpy(&four, x, sizeof four);
  return Ints{} + four;
}

// Adds the products of four k in every lane. Sums of a part are int32 with VNNI, pairs of int16 without it.
template <bool kVnni>
[[gnu::always_inline]] inline Ints add_products(Ints sum, Ints weights, Ints a) {
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

// What add_products made, in int32.
template <bool kVnni>
[[gnu::always_inline]] inline Ints whole_sums(Ints sum) {
#if defined(__x86_64__)
  if constexpr (!kVnni) sum = madd(sum, Ints{} + 0x00010001);
#endif
  return sum;
}

// What a kernel reads and writes: R rows of x, W vectors of columns.
struct W4A8Tile {
  const W4A8Linear* p;
  const std::int8_t* values;
  const float *scales, *sums;  // W4A8Rows
  const std::int32_t* shifts;
  std::int64_t panel;  // the first
  float* out;          // [R][W · width], rows ldo apart
  std::int64_t ldo;
  bool alone;  // each panel is read once, one behind the other
};

template <bool kVnni, Weights F, int R, int W>
[[gnu::noinline]] void multiply(const W4A8Tile& t) {
  constexpr bool kNvfp4 = F == Weights::kNvfp4;
  constexpr int kSumsOfPart = kNvfp4 ? kPart / kBlock : 1, kStepsOfSum = kSteps / kSumsOfPart;
  const W4A8Linear& p = *t.p;
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group, parts_of_group = kNvfp4 ? 1 : p.group / kPart;
  const std::int64_t per_group = scales_of_panel<F>(p);
  const std::int32_t* words[W];
  std::int64_t scale_at[W];
#pragma GCC unroll 8
  for (int w = 0; w < W; ++w) {
    const std::int64_t panel = t.panel + w / kPerPanel, within = w % kPerPanel * kWidth;
    words[w] = p.weight + panel * (p.k / 8) * 16 + within;
    scale_at[w] = panel * groups * per_group + within;
  }
  const Ints halves = Ints{} + 0x0f0f0f0f;
  V total[R][W] = {};
  std::int64_t part = 0;
  for (std::int64_t g = 0; part < parts; ++g) {
    V scale[W];
    if constexpr (!kNvfp4) {
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) {
        scale[w] = load_scales<F>(p.scales, scale_at[w] + g * per_group);
        V base = -8.0f * scale[w];
        if (p.has_zeros) base += load_scales<F>(p.scales, scale_at[w] + g * per_group + kW4A8Columns);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) total[r][w] += base * t.sums[r * groups + g];
      }
    }
    for (std::int64_t end = part + parts_of_group; part < end; ++part) {
      // At the end of several panels the next words are those of as many panels behind them.
      const std::int64_t ahead = kAhead + (part + kPartsAhead < parts ? 0 : (W / kPerPanel - 1) * p.k * 2);
      const bool page = t.alone && part % kPartsAhead == 0;
#pragma GCC unroll 8
      for (int w = 0; w < W; w += kPerPanel) {
        const std::int32_t* const from = words[w] + part * kSteps * 16 + ahead;
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) __builtin_prefetch(from + step * 16, 0, 3);
        if (page) __builtin_prefetch(from + kAhead, 0, 3);  // its address is known when its lines are asked for
      }
#pragma GCC unroll 2
      for (int of_part = 0; of_part < kSumsOfPart; ++of_part) {
        const std::int64_t block = part * kSumsOfPart + of_part, first = block * kStepsOfSum;
        const std::int8_t* const x = t.values + first * 8;
        Ints sum[R][W] = {};
#pragma GCC unroll 4
        for (int step = 0; step < kStepsOfSum; ++step) {
          Ints low[W], high[W];
#pragma GCC unroll 8
          for (int w = 0; w < W; ++w) {
            const Ints word = load_ints(words[w] + (first + step) * 16);
            low[w] = word & halves, high[w] = (word >> 4) & halves;
            if constexpr (kNvfp4) low[w] = shifted_values(low[w]), high[w] = shifted_values(high[w]);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const std::int8_t* const at = x + r * p.k + step * 8;
            const Ints first_four = load_four(at), others = load_four(at + 4);
#pragma GCC unroll 8
            for (int w = 0; w < W; ++w) {
              sum[r][w] = add_products<kVnni>(sum[r][w], low[w], first_four);
              sum[r][w] = add_products<kVnni>(sum[r][w], high[w], others);
            }
          }
        }
        if constexpr (kNvfp4) {
#pragma GCC unroll 8
          for (int w = 0; w < W; ++w) {
            scale[w] = load_block_scales(static_cast<const std::uint8_t*>(p.scales) + scale_at[w] + block * 16);
          }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const float row_scale = t.scales[r * parts + part];
          const std::int32_t shift = kNvfp4 ? t.shifts[r * groups + block] : 0;
#pragma GCC unroll 8
          for (int w = 0; w < W; ++w) {
            const V exact = __builtin_convertvector(whole_sums<kVnni>(sum[r][w]) + shift, V);
            total[r][w] += exact * (scale[w] * row_scale);
          }
        }
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

template <bool kVnni, Weights F, int R>
constexpr Kernels kernels_of() {
  return {multiply<kVnni, F, R, panels_of(R) * kPerPanel>, multiply<kVnni, F, R, kPerPanel>};
}

template <bool kVnni, Weights F>
Kernels kernels_for(int rows) {
  constexpr Kernels kTable[] = {
      kernels_of<kVnni, F, 1>(),
#if defined(__AVX2__)
      kernels_of<kVnni, F, 2>(),
#endif
#if defined(__AVX512F__)
      kernels_of<kVnni, F, 3>(), kernels_of<kVnni, F, 4>(), kernels_of<kVnni, F, 5>(), kernels_of<kVnni, F, 6>(),
#endif
  };
  return kTable[rows - 1];
}

template <bool kVnni>
Kernels kernels_for(const W4A8Linear& p, int rows) {
  if (p.format == W4A8Format::kNvfp4) return kernels_for<kVnni, Weights::kNvfp4>(rows);
  switch (p.scale_type) {
    case ScaleType::kBFloat16:
      return kernels_for<kVnni, Weights::kBFloat16Scales>(rows);
    case ScaleType::kFloat16:
      return kernels_for<kVnni, Weights::kFloat16Scales>(rows);
    case ScaleType::kFloat32:
      break;
  }
  return kernels_for<kVnni, Weights::kFloat32Scales>(rows);
}

}  // namespace

void quantize_parts(const W4A8Linear& p, std::int64_t row, std::int64_t row_end, const W4A8Rows& rows) {
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group, parts_of_group = p.group / kPart;
  alignas(64) float padded[kPart];
  for (; row < row_end; ++row) {
    const float* const x = p.x + row * p.x_stride;
    float* const scales = rows.scales + row * parts;
    for (std::int64_t part = 0; part < parts; ++part) {
      const std::int64_t at = part * kPart, left = p.x_width - at;
      const float* from = x + at;
      if (left < kPart) {
        for (int i = 0; i < kPart; ++i) padded[i] = i < left ? from[i] : 0.0f;
        from = padded;
      }
      Ints halves[2];
      quantize_part(from, rows.values + row * p.k + at, scales[part], halves);
      if (p.format == W4A8Format::kNvfp4) {
        std::int32_t* const shifts = rows.shifts + row * groups + part * 2;
        shifts[0] = -12 * sum_of_lanes(halves[0]), shifts[1] = -12 * sum_of_lanes(halves[1]);
      } else {
        const float sum = scales[part] * static_cast<float>(sum_of_lanes(halves[0] + halves[1]));
        float& group = rows.sums[row * groups + part / parts_of_group];
        group = part % parts_of_group == 0 ? sum : group + sum;
      }
    }
  }
}

void w4a8_slice(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t row, std::int64_t row_end,
                std::int64_t panel, std::int64_t panel_end) {
  alignas(64) float tile[kMostRows * panels_of(1) * 16];
  const std::int64_t parts = p.k / kPart, groups = p.k / p.group;
  const std::int64_t first = row, m = row_end - row;
  const bool plain = p.global_scales == nullptr && p.bias == nullptr;
  const bool alone = m == 1 || (m <= kMostRows && m * p.k < kFewRowBytes);
  // As many panels for all rows as the first of them take: a panel stays in L1 while rows pass.
  const std::int64_t most = alone ? 1 : panels_of(m < kMostRows ? static_cast<int>(m) : kMostRows);
  while (panel < panel_end) {
    const std::int64_t panels = panel_end - panel < most ? 1 : most;
    for (row = first; row < row_end; row += kMostRows) {
      const int count = row_end - row < kMostRows ? static_cast<int>(row_end - row) : kMostRows;
      const Kernels kernels = vnni ? kernels_for<true>(p, count) : kernels_for<false>(p, count);
      W4A8Tile t{&p,
                 rows.values + row * p.k,
                 rows.scales + row * parts,
                 rows.sums + row * groups,
                 rows.shifts + row * groups,
                 panel,
                 tile,
                 0,
                 alone};
      for (std::int64_t done = 0; done < panels;) {
        const int at_once = panels - done < panels_of(count) ? 1 : panels_of(count);
        t.panel = panel + done;
        const std::int64_t col = t.panel * 16, left = p.n - col, columns = at_once * 16;
        const bool direct = plain && left >= columns;
        t.out = direct ? p.out + row * p.n + col : tile, t.ldo = direct ? p.n : columns;
        (at_once == 1 ? kernels.one : kernels.all)(t);
        if (!direct) write_rows(p, tile, columns, row, count, col, left < columns ? left : columns);
        done += at_once;
      }
    }
    panel += panels;
  }
}

int w4a8_rows() { return kMostRows; }

}  // namespace untorch::kernels::UNTORCH_ISA
