// Depthwise W8A8 convolution in NHWC: four taps of each channel are interleaved into a word, so that one dot product
// (vpdpbusd) makes four multiply-adds in each lane.
//
//   16 channels × 4 taps:  t0 = a0 … a15, t1, t2, t3   →   a0 b0 c0 d0 | a1 b1 c1 d1 | …     two rounds of unpacking
//
// Weights [ceil(channels/16)][ceil(taps/4)][16][4]. With AVX-512 64 channels pass at a time: 4 loads, 8 unpacks and 4
// dot products for 256 multiply-adds, where float32 has 16 loads and 16 multiply-adds.
#include <cstdint>

#include "kernels/cpu/w8a8/convolution_finish.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t P = kPackWidth;
constexpr int N = kLanes<float>;
constexpr std::int64_t kWide = kVectorBytes;  // channels of a block: bytes of a vector

typedef std::uint8_t Bytes __attribute__((vector_size(kVectorBytes)));
typedef std::uint8_t UnalignedBytes __attribute__((vector_size(kVectorBytes), aligned(1), may_alias));

// unpacklo and unpackhi of bytes and of 16-bit halves, in each 128 bits.
[[gnu::always_inline]] inline void interleave(const Bytes (&t)[4], Ints (&words)[4]) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_unpacklo_epi8((__m512i)t[0], (__m512i)t[1]);
  const __m512i b = _mm512_unpackhi_epi8((__m512i)t[0], (__m512i)t[1]);
  const __m512i c = _mm512_unpacklo_epi8((__m512i)t[2], (__m512i)t[3]);
  const __m512i d = _mm512_unpackhi_epi8((__m512i)t[2], (__m512i)t[3]);
  words[0] = (Ints)_mm512_unpacklo_epi16(a, c), words[1] = (Ints)_mm512_unpackhi_epi16(a, c);
  words[2] = (Ints)_mm512_unpacklo_epi16(b, d), words[3] = (Ints)_mm512_unpackhi_epi16(b, d);
#elif defined(__AVX2__)
  const __m256i a = _mm256_unpacklo_epi8((__m256i)t[0], (__m256i)t[1]);
  const __m256i b = _mm256_unpackhi_epi8((__m256i)t[0], (__m256i)t[1]);
  const __m256i c = _mm256_unpacklo_epi8((__m256i)t[2], (__m256i)t[3]);
  const __m256i d = _mm256_unpackhi_epi8((__m256i)t[2], (__m256i)t[3]);
  words[0] = (Ints)_mm256_unpacklo_epi16(a, c), words[1] = (Ints)_mm256_unpackhi_epi16(a, c);
  words[2] = (Ints)_mm256_unpacklo_epi16(b, d), words[3] = (Ints)_mm256_unpackhi_epi16(b, d);
#else
  alignas(16) std::uint8_t made[64];
  for (int c = 0; c < 16; ++c) {
    for (int tap = 0; tap < 4; ++tap) made[4 * c + tap] = t[tap][c];
  }
  for (int q = 0; q < 4; ++q) words[q] = load_ints(made + 16 * q);
#endif
}

// Lane l of vector q has channels 16·l + 4·q …; gives vectors of consecutive channels. It is its own inverse.
[[gnu::always_inline]] inline void exchange(Ints (&v)[4]) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_maskz_shuffle_i32x4(0xffff, (__m512i)v[0], (__m512i)v[1], 0x44);  // v0.01 v1.01
  const __m512i b = _mm512_maskz_shuffle_i32x4(0xffff, (__m512i)v[0], (__m512i)v[1], 0xee);  // v0.23 v1.23
  const __m512i c = _mm512_maskz_shuffle_i32x4(0xffff, (__m512i)v[2], (__m512i)v[3], 0x44);
  const __m512i d = _mm512_maskz_shuffle_i32x4(0xffff, (__m512i)v[2], (__m512i)v[3], 0xee);
  v[0] = (Ints)_mm512_maskz_shuffle_i32x4(0xffff, a, c, 0x88),
  v[1] = (Ints)_mm512_maskz_shuffle_i32x4(0xffff, a, c, 0xdd);
  v[2] = (Ints)_mm512_maskz_shuffle_i32x4(0xffff, b, d, 0x88),
  v[3] = (Ints)_mm512_maskz_shuffle_i32x4(0xffff, b, d, 0xdd);
#elif defined(__AVX2__)
  const __m256i a = (__m256i)v[0], b = (__m256i)v[1], c = (__m256i)v[2], d = (__m256i)v[3];
  v[0] = (Ints)_mm256_permute2x128_si256(a, b, 0x20), v[1] = (Ints)_mm256_permute2x128_si256(c, d, 0x20);
  v[2] = (Ints)_mm256_permute2x128_si256(a, b, 0x31), v[3] = (Ints)_mm256_permute2x128_si256(c, d, 0x31);
#else
  (void)v;
#endif
}

// The weights of one word of taps for a block of channels, in the order of interleave().
[[gnu::always_inline]] inline void load_block(const std::int8_t* weight, std::int64_t panel_step, std::int64_t panels,
                                              Ints (&w)[4]) {
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const std::int64_t panel = v * N / P, at = v * N % P;
    w[v] = panel < panels ? (Ints)load_weights(weight + panel * panel_step + at * 4) : Ints{};
  }
  // The inverse of exchange(): vectors of consecutive channels to interleaved ones.
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i a = (__m256i)w[0], b = (__m256i)w[1], c = (__m256i)w[2], d = (__m256i)w[3];
  w[0] = (Ints)_mm256_permute2x128_si256(a, c, 0x20), w[1] = (Ints)_mm256_permute2x128_si256(a, c, 0x31);
  w[2] = (Ints)_mm256_permute2x128_si256(b, d, 0x20), w[3] = (Ints)_mm256_permute2x128_si256(b, d, 0x31);
#else
  exchange(w);
#endif
}

constexpr int kPixels = 32;  // of a tile
constexpr int kMostWords = static_cast<int>(kInt8DepthwiseTaps) / 4;

// A tile of pixels × a block of channels.
struct Block {
  std::int64_t pixels, words, panels;  // words of taps, panels of channels
  std::int64_t first, channels;        // of these at most kWide
  const std::uint8_t* const* rows;     // [pixels][4 · words]
  const Ints* weight;                  // [words][4], as interleave() orders channels
  const std::int32_t* start;
  std::int32_t* sums;  // [pixels][kWide]
};

[[gnu::always_inline]] inline Bytes load_bytes(const std::uint8_t* from, std::int64_t channels) {
  if (channels == kWide) return (Bytes) * reinterpret_cast<const UnalignedBytes*>(from);
#if defined(__AVX512F__)
  return (Bytes)_mm512_maskz_loadu_epi8(~std::uint64_t{0} >> (64 - channels), from);
#else
  alignas(kVectorBytes) std::uint8_t some[kVectorBytes] = {};
  for (std::int64_t c = 0; c < channels; ++c) some[c] = from[c];
  return *reinterpret_cast<const Bytes*>(some);
#endif
}

// The words of four taps for a block of channels.
[[gnu::always_inline]] inline void load_words(const Block& t, const std::uint8_t* const* rows, Ints (&a)[4]) {
  Bytes taps[4];
#pragma GCC unroll 4
  for (int tap = 0; tap < 4; ++tap) taps[tap] = load_bytes(rows[tap] + t.first, t.channels);
  interleave(taps, a);
}

[[gnu::always_inline]] inline void store_sums(const Block& t, std::int64_t pixel, Ints (&acc)[4]) {
  exchange(acc);
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    if (v * N >= t.panels * P) break;
    *reinterpret_cast<LooseInts*>(t.sums + pixel * kWide + v * N) = acc[v] + load_ints(t.start + v * N);
  }
}

[[gnu::noinline]] void block_madd(const Block& t) {
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel) {
    const std::uint8_t* const* const rows = t.rows + pixel * 4 * t.words;
    Ints acc[4] = {};
    for (std::int64_t word = 0; word < t.words; ++word) {
      Ints a[4];
      load_words(t, rows + 4 * word, a);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const auto both = (Shorts)t.weight[4 * word + v];
        acc[v] = dot_madd(acc[v], a[v], (Ints)((both << 8) >> 8), (Ints)(both >> 8));
      }
    }
    store_sums(t, pixel, acc);
  }
}

#if defined(UNTORCH_VNNI)
[[gnu::noinline]] UNTORCH_VNNI void block_vnni(const Block& t) {
  for (std::int64_t pixel = 0; pixel < t.pixels; ++pixel) {
    const std::uint8_t* const* const rows = t.rows + pixel * 4 * t.words;
    Ints acc[4] = {};
    for (std::int64_t word = 0; word < t.words; ++word) {
      Ints a[4];
      load_words(t, rows + 4 * word, a);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) acc[v] = UNTORCH_DPBUSD(acc[v], a[v], t.weight[4 * word + v]);
    }
    store_sums(t, pixel, acc);
  }
}
#endif

// The addresses of a tile's input rows, [pixels][4 · words]; taps that fill up the last word read zero points, whose
// weights are 0.
void fill_rows(const Int8ConvolutionCall& call, std::int64_t row, std::int64_t x0, std::int64_t pixels,
               const std::uint8_t** to) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t image = row / p.output[0], top = row % p.output[0] * p.stride[0] - p.padding[0];
  const std::uint8_t* const from = call.input + image * call.batch_step;
  const std::uint8_t* const zeros = call.zeros + image * call.zeros_step;
  const std::int64_t behind = 4 * p.words() - p.taps();
  for (std::int64_t x = x0; x < x0 + pixels; ++x) {
    const std::int64_t left = x * p.stride[1] - p.padding[1];
    for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky) {
      const std::int64_t iy = top + ky * p.dilation[0];
      const bool inside = iy >= 0 && iy < p.input[0];
      const std::uint8_t* const line = from + iy * call.row_step;
      std::int64_t ix = left;
      for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx, ix += p.dilation[1]) {
        *to++ = inside && ix >= 0 && ix < p.input[1] ? line + ix * call.pixel_step : zeros;
      }
    }
    for (std::int64_t tap = 0; tap < behind; ++tap) *to++ = zeros;
  }
}

}  // namespace

void int8_depthwise_slice(const Int8ConvolutionCall& call, std::int64_t row0, std::int64_t row1) {
  const Int8Convolution& p = *call.problem;
  const std::int64_t channels = p.groups, words = p.words(), width = p.output[1];
  const std::int64_t panel_step = words * kPanelBytes;
  Finisher finish(call);
  alignas(64) std::int32_t sums[kPixels * kWide];
  Ints weight[kMostWords * 4];
  const std::uint8_t* rows[kPixels * 4 * kMostWords];
#if defined(UNTORCH_VNNI)
  const auto block = call.vnni ? block_vnni : block_madd;
#else
  const auto block = block_madd;
#endif
  const std::int64_t tiles = (width + kPixels - 1) / kPixels;
  for (std::int64_t row = row0; row < row1; ++row) {
    const std::int64_t shift = row / p.output[0] * call.channel_step;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t x = width * tile / tiles, pixels = width * (tile + 1) / tiles - x;
      fill_rows(call, row, x, pixels, rows);
      for (std::int64_t c = 0; c < channels; c += kWide) {
        Block t{};
        t.pixels = pixels, t.first = c, t.channels = channels - c < kWide ? channels - c : kWide;
        t.words = words, t.panels = (t.channels + P - 1) / P, t.rows = rows, t.weight = weight, t.sums = sums;
        t.start = call.start + shift + c;
        for (std::int64_t word = 0; word < words; ++word) {
          Ints w[4];
          load_block(p.weight + c / P * panel_step + word * kPanelBytes, panel_step, t.panels, w);
          for (int v = 0; v < 4; ++v) weight[4 * word + v] = w[v];
        }
        block(t);
        FinishTile f{};
        f.rows = pixels, f.columns = t.channels, f.sums = sums, f.lds = kWide;
        f.factor = call.factor + shift + c, f.bias = call.bias + c, f.ldc = channels;
        f.at = (row * width + x) * channels + c;
        finish(f);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
