// The int4 W4A16 linear layer's inner loops, by instruction-set level.
//
// Small M: memory-bound, 0.5 bytes a weight and 2·(bytes of a scale)/group, each read once. The 16 words of a column's
// k block (128 k) are 64 contiguous bytes, so a vector holds one column; a shift by 4·i and a mask (with AVX-512 a
// permutation of a table of the 16 values, which needs no mask) give nibble i of 16 words, and x is permuted to match
// beforehand. For each 16 weights: 2 to 4 instructions, and an FMA a row.
//
// Large M: weights are dequantized to panels for the packed GEMM (gemm_packed.isa.cpp).
#include <cstdint>

#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/w4a16/int4_levels.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int kWidth = kLanes<float>, kPieces = 16 / kWidth;
constexpr int kWordsOfBlock = 128;
using V = Vector<float>;
typedef std::int32_t Words __attribute__((vector_size(kVectorBytes)));
typedef std::uint32_t Bits __attribute__((vector_size(kVectorBytes)));
typedef std::int32_t LooseWords __attribute__((vector_size(kVectorBytes), aligned(4), may_alias));

// Row of a nibble within 32 rows, without the lane's part.
constexpr int offset_of(int nibble) { return nibble % 4 * 8 + nibble / 4; }

[[gnu::always_inline]] inline Bits load_words(const std::int32_t* p) {
  return (Bits) * reinterpret_cast<const LooseWords*>(p);
}

// q - 8 of nibble I.
template <int I>
[[gnu::always_inline]] inline V decode(Bits words) {
#if defined(__AVX512F__)
  const V table = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  return (V)_mm512_permutexvar_ps((__m512i)(words >> (4 * I)), (__m512)table);
#else
  return __builtin_convertvector((Words)((words >> (4 * I)) & 15u), V) - 8.0f;
#endif
}

// Four values, repeated over a vector. By name: a shuffle of a narrow vector goes through memory.
[[gnu::always_inline]] inline V repeat_four(const float* p) {
#if defined(__AVX512F__)
  return (V)_mm512_maskz_broadcast_f32x4(0xffff, _mm_loadu_ps(p));
#elif defined(__AVX2__)
  return (V)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
#else
  return load(p);
#endif
}

std::int64_t scale_columns(const Int4Linear& p) { return p.scale_columns > 0 ? p.scale_columns : p.n; }

// `count` scales and zeros from `at` on as floats; a multiple of 16.
void load_scales(const Int4Linear& p, std::int64_t at, int count, float* to) {
  const auto halves = [&]<HalfType H>() __attribute__((always_inline)) {
    const std::uint16_t* const from = static_cast<const std::uint16_t*>(p.scales) + at;
    for (int i = 0; i < count; i += kWidth) store(to + i, load_half<H>(from + i));
  };
  switch (p.scale_type) {
    case ScaleType::kFloat32:
      for (int i = 0; i < count; i += kWidth) store(to + i, load(static_cast<const float*>(p.scales) + at + i));
      return;
    case ScaleType::kBFloat16:
      return halves.template operator()<HalfType::kBFloat16>();
    case ScaleType::kFloat16:
      return halves.template operator()<HalfType::kFloat16>();
  }
}

// Scale and zero of a tile's columns over a k block, for the words j = 0 … 3, 32 k each.
struct TileScales {
  alignas(64) float scale[8][4], zero[8][4];
};

void load_tile_scales(const Int4Linear& p, std::int64_t tile, std::int64_t block, TileScales& to) {
  float row[16];
  std::int64_t loaded = -1;
  for (int j = 0; j < 4; ++j) {
    const std::int64_t at = block * kInt4Block + 32 * j, group = at / p.group;
    if (at >= p.k) {  // zero beyond k, whatever the last scale is
      for (int c = 0; c < 16; ++c) row[c] = 0.0f;
    } else if (group != loaded) {
      load_scales(p, (group * scale_columns(p) + tile * kInt4Tile) * 2, 16, row);
      loaded = group;
    }
    for (int c = 0; c < 8; ++c) to.scale[c][j] = row[2 * c], to.zero[c][j] = row[2 * c + 1];
  }
}

// The 128 words of a tile's k block, [column][lane % 4][4]: in place for inner_k_tiles 8, else gathered in `buffer`
// with zeros behind k.
const std::int32_t* block_of(const Int4Linear& p, std::int64_t tile, std::int64_t block, std::int32_t* buffer) {
  const std::int64_t words_of_tile = p.k;  // 8 columns, 8 values a word
  const std::int32_t* const from = p.weight + tile * words_of_tile;
  if (p.inner_k_tiles == 8) return from + block * kWordsOfBlock;
  const int words = p.inner_k_tiles / 2;
  for (int j = 0; j < 4; ++j) {
    const std::int64_t at = block * 4 + j;  // among the tile's words of 32 k
    const bool inside = at * 32 < p.k;
    const std::int32_t* const lane0 = from + at / words * 32 * words + at % words;
    for (int lane = 0; lane < 32; ++lane) buffer[lane * 4 + j] = inside ? lane0[lane * words] : 0;
  }
  return buffer;
}

template <int I, int R>
[[gnu::always_inline]] inline void add_nibble(Bits words, V scale, V zero, const float* x, V (&sum)[R]) {
  const V w = decode<I>(words) * scale + zero;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] += w * load(x + (I * R + r) * 16);
}

#if defined(__AVX512F__)
template <int I, int R>
[[gnu::always_inline]] inline void add_from_table(Bits words, V table, const float* x, V (&sum)[R]) {
  const V w = (V)_mm512_permutexvar_ps((__m512i)(words >> (4 * I)), (__m512)table);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r] += w * load(x + (I * R + r) * 16);
}
#endif

template <int R>
void gemm_tile(const Int4Linear& p, std::int64_t row, const float* permuted, std::int64_t tile) {
  alignas(64) float sums[8][R][16] = {};
  alignas(64) std::int32_t buffer[kWordsOfBlock];
  TileScales scales;
  const std::int64_t blocks = int4_blocks(p.k);
  const bool one_group = p.group >= kInt4Block;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const std::int32_t* const words = block_of(p, tile, b, buffer);
    const float* const x = permuted + b * (8 * R * 16);
    if (!one_group || b % (p.group / kInt4Block) == 0) load_tile_scales(p, tile, b, scales);
    for (int c = 0; c < 8; ++c) {
#if defined(__AVX512F__)
      if (one_group) {
        const V values = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
        const V table = values * scales.scale[c][0] + scales.zero[c][0];
        const Bits word = load_words(words + c * 16);
        V sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r] = load(sums[c][r]);
        add_from_table<0, R>(word, table, x, sum);
        add_from_table<1, R>(word, table, x, sum);
        add_from_table<2, R>(word, table, x, sum);
        add_from_table<3, R>(word, table, x, sum);
        add_from_table<4, R>(word, table, x, sum);
        add_from_table<5, R>(word, table, x, sum);
        add_from_table<6, R>(word, table, x, sum);
        add_from_table<7, R>(word, table, x, sum);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) store(sums[c][r], sum[r]);
        continue;
      }
#endif
      const V scale = repeat_four(scales.scale[c]), zero = repeat_four(scales.zero[c]);
      for (int piece = 0; piece < kPieces; ++piece) {
        const Bits word = load_words(words + c * 16 + piece * kWidth);
        const float* const from = x + piece * kWidth;
        V sum[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) sum[r] = load(sums[c][r] + piece * kWidth);
        add_nibble<0, R>(word, scale, zero, from, sum);
        add_nibble<1, R>(word, scale, zero, from, sum);
        add_nibble<2, R>(word, scale, zero, from, sum);
        add_nibble<3, R>(word, scale, zero, from, sum);
        add_nibble<4, R>(word, scale, zero, from, sum);
        add_nibble<5, R>(word, scale, zero, from, sum);
        add_nibble<6, R>(word, scale, zero, from, sum);
        add_nibble<7, R>(word, scale, zero, from, sum);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) store(sums[c][r] + piece * kWidth, sum[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    float* const to = p.out + (row + r) * p.n + tile * kInt4Tile;
    for (int c = 0; c < 8; ++c) {
      float* const s = sums[c][r];
      for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) s[i] += s[i + half];
      }
      to[c] = p.bias == nullptr ? s[0] : s[0] + p.bias[tile * kInt4Tile + c];
    }
  }
}

template <int R>
void gemm_rows(const Int4Linear& p, std::int64_t row, const float* permuted, std::int64_t tile, std::int64_t tile_end) {
  for (; tile < tile_end; ++tile) gemm_tile<R>(p, row, permuted, tile);
}

}  // namespace

void permute_rows(const Int4Linear& p, std::int64_t row, std::int64_t rows, float* permuted) {
  const std::int64_t blocks = int4_blocks(p.k);
  for (std::int64_t b = 0; b < blocks; ++b) {
    float* const to = permuted + b * (8 * rows * 16);
    for (std::int64_t r = 0; r < rows; ++r) {
      const float* const from = p.x + (row + r) * p.x_stride;
      for (int nibble = 0; nibble < 8; ++nibble) {
        for (int lane = 0; lane < 16; ++lane) {
          const std::int64_t at = b * kInt4Block + lane % 4 * 32 + lane / 4 * 2 + offset_of(nibble);
          to[(nibble * rows + r) * 16 + lane] = at < p.x_width ? from[at] : 0.0f;
        }
      }
    }
  }
}

void gemm_tiles(const Int4Linear& p, std::int64_t row, std::int64_t rows, const float* permuted, std::int64_t tile,
                std::int64_t tile_end) {
  static_assert(kInt4Rows == 8);
  using Kernel = void (*)(const Int4Linear&, std::int64_t, const float*, std::int64_t, std::int64_t);
  constexpr Kernel kKernels[] = {gemm_rows<1>, gemm_rows<2>, gemm_rows<3>, gemm_rows<4>,
                                 gemm_rows<5>, gemm_rows<6>, gemm_rows<7>, gemm_rows<8>};
  kKernels[rows - 1](p, row, permuted, tile, tile_end);
}

namespace {

// Rows [32·at, 32·at + 32) of a panel of 16 columns: two tiles, or one and zeros.
template <int I>
[[gnu::always_inline]] inline void dequantize_nibble(const std::int32_t (&words)[16], const float (&scale)[16],
                                                     const float (&zero)[16], std::int64_t row, std::int64_t rows,
                                                     float* panel) {
  if (row + offset_of(I) >= rows) return;
  float* const to = panel + (row + offset_of(I)) * 16;
#pragma GCC unroll 4
  for (int piece = 0; piece < kPieces; ++piece) {
    const int at = piece * kWidth;
    store(to + at, decode<I>(load_words(words + at)) * load(scale + at) + load(zero + at));
  }
}

}  // namespace

void dequantize_panels(const Int4Linear& p, std::int64_t col, std::int64_t col_end, float* panels) {
  const int words_of_lane = p.inner_k_tiles / 2;
  const std::int64_t rows = p.x_width;
  alignas(64) float pairs[32], scale[16], zero[16];
  alignas(64) std::int32_t words[16];
  for (; col < col_end; col += kPackWidth, panels += rows * kPackWidth) {
    const int width = p.n - col < kPackWidth ? 8 : 16;
    for (int c = width; c < 16; ++c) words[c] = 0, pairs[2 * c] = pairs[2 * c + 1] = 0.0f;
    const std::int32_t* const tile = p.weight + col / kInt4Tile * p.k;
    for (std::int64_t at = 0; at * 32 < rows; ++at) {
      if (at * 32 % p.group == 0) {
        load_scales(p, (at * 32 / p.group * scale_columns(p) + col) * 2, 2 * width, pairs);
        for (int c = 0; c < 16; ++c) scale[c] = pairs[2 * c], zero[c] = pairs[2 * c + 1];
      }
      const std::int32_t* const lane0 = tile + at / words_of_lane * 32 * words_of_lane + at % words_of_lane;
      for (int t = 0; t < 4; ++t) {
        for (int c = 0; c < width; ++c) words[c] = lane0[c / 8 * p.k + (c % 8 * 4 + t) * words_of_lane];
        const std::int64_t row = at * 32 + 2 * t;
        dequantize_nibble<0>(words, scale, zero, row, rows, panels);
        dequantize_nibble<1>(words, scale, zero, row, rows, panels);
        dequantize_nibble<2>(words, scale, zero, row, rows, panels);
        dequantize_nibble<3>(words, scale, zero, row, rows, panels);
        dequantize_nibble<4>(words, scale, zero, row, rows, panels);
        dequantize_nibble<5>(words, scale, zero, row, rows, panels);
        dequantize_nibble<6>(words, scale, zero, row, rows, panels);
        dequantize_nibble<7>(words, scale, zero, row, rows, panels);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
