// Quantizes rows of activations to uint8, each with a scale and a zero point: a pass for the range, a pass for the
// values. Bound by the loads: two a value, where the row stays in L1 between the passes.
//
// Rounding is that of cvtps2dq (to nearest, ties to even) on x · (1 / scale), and the zero point is added as an
// integer, so that no level fuses the two: all give the same bytes.
#include <cstdint>

#include "kernels/cpu/gemm/half_vector.h"
#include "kernels/cpu/w8a8/int8_round.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

using V = Vector<float>;
constexpr int N = kByteLanes;

// A row in float32, a vector at a time; zeros behind its end, which every range holds.
struct FloatRow {
  const float* from;
  V whole(std::int64_t j) const { return load(from + j); }
  V part(std::int64_t j, std::int64_t count) const {
    float some[N] = {};
    for (std::int64_t x = 0; x < count; ++x) some[x] = from[j + x];
    return load(some);
  }
};
template <HalfType H>
struct HalfRow {
  const std::uint16_t* from;
  V whole(std::int64_t j) const { return load_half<H>(from + j); }
  V part(std::int64_t j, std::int64_t count) const { return load_half_part<H>(from + j, count); }
};

struct Range {
  float low = 0.0f, high = 0.0f;
  std::int32_t magnitude = 0;  // the bits of max|x|; beyond kInfinityBits: NaN
};

template <class Row>
Range range_of(const Row& row, std::int64_t k) {
  V low{}, high{};
  Ints magnitude{};
  const auto see = [&](V x) __attribute__((always_inline)) {
    const Ints bits = (Ints)x & 0x7fffffff;
    low = smaller(x, low), high = larger(x, high);
    magnitude = bits > magnitude ? bits : magnitude;
  };
  std::int64_t j = 0;
  for (; j + N <= k; j += N) see(row.whole(j));
  if (j < k) see(row.part(j, k - j));
  Range out;
  alignas(64) float lows[N], highs[N];
  alignas(64) std::int32_t magnitudes[N];
  store(lows, low), store(highs, high);
  *reinterpret_cast<LooseInts*>(magnitudes) = magnitude;
  for (int i = 0; i < N; ++i) {
    out.low = lows[i] < out.low ? lows[i] : out.low;
    out.high = highs[i] > out.high ? highs[i] : out.high;
    out.magnitude = magnitudes[i] > out.magnitude ? magnitudes[i] : out.magnitude;
  }
  return out;
}

struct Quantization {
  float scale, inverse;
  std::int32_t zero;
};

Quantization quantization_of(ActivationRange kind, const Range& range) {
  if (range.magnitude >= kInfinityBits) return {__builtin_nanf(""), 0.0f, 0};
  if (kind == ActivationRange::kSymmetric) {
    const float largest = range.high > -range.low ? range.high : -range.low;
    const float scale = largest / 127.0f > kLeastScale ? largest / 127.0f : kLeastScale;
    return {scale, 1.0f / scale, 128};
  }
  const float width = range.high / 255.0f - range.low / 255.0f;  // apart: the difference may overflow
  const float scale = width > kLeastScale ? width : kLeastScale, inverse = 1.0f / scale;
  const auto zero = static_cast<std::int32_t>(__builtin_rintf(-range.low * inverse));
  return {scale, inverse, zero > 255 ? 255 : zero};
}

// Bytes to even and odd pairs, in place and from the end.
void expand(std::uint32_t* words, std::int64_t groups) {
  for (std::int64_t g = groups - 1; g >= 0; --g) {
    const std::uint32_t four = words[g];
    words[2 * g] = four & 0x00ff00ffu;
    words[2 * g + 1] = (four >> 8) & 0x00ff00ffu;
  }
}

template <class Row>
void quantize_row(const Int8Linear& p, const Row& row, bool vnni, std::uint32_t* words, float* scale,
                  std::int32_t* zero) {
  Quantization q{p.input_scale, 1.0f / p.input_scale, p.input_zero};
  if (p.range != ActivationRange::kStatic) q = quantization_of(p.range, range_of(row, p.k));
  auto* const bytes = reinterpret_cast<std::uint8_t*>(words);
  Ints magnitude{};
  const auto put = [&](std::int64_t j, V x) __attribute__((always_inline)) {
    const Ints bits = (Ints)x & 0x7fffffff;
    magnitude = bits > magnitude ? bits : magnitude;
    *reinterpret_cast<LooseNarrow*>(bytes + j) = (LooseNarrow)quantized(x, q.inverse, q.zero);
  };
  std::int64_t j = 0;
  for (; j + N <= p.k; j += N) put(j, row.whole(j));
  if (j < p.k) put(j, row.part(j, p.k - j));
  if (p.range == ActivationRange::kStatic) {
    for (int i = 0; i < N; ++i) {
      if (magnitude[i] > kInfinityBits) q.scale = __builtin_nanf("");
    }
  }
  if (!vnni) expand(words, (p.k + kInt8Group - 1) / kInt8Group);
  *scale = q.scale, *zero = q.zero;
}

template <class Row, class T>
void quantize_all(const Int8Linear& p, bool vnni, std::int64_t row, std::int64_t row_end, const Int8Rows& rows) {
  for (std::int64_t i = row; i < row_end; ++i) {
    const Row from{static_cast<const T*>(p.x) + i * p.x_stride};
    quantize_row(p, from, vnni, rows.words + i * rows.stride, rows.scale + i, rows.zero + i);
  }
}

template <class Row, class T>
void range_all(const Int8Linear& p, std::int64_t row, std::int64_t row_end, RowsRange& all) {
  for (std::int64_t i = row; i < row_end; ++i) {
    const Range range = range_of(Row{static_cast<const T*>(p.x) + i * p.x_stride}, p.k);
    all.low = range.low < all.low ? range.low : all.low;
    all.high = range.high > all.high ? range.high : all.high;
    all.finite = all.finite && range.magnitude < kInfinityBits;
  }
}

}  // namespace

std::int64_t row_words(std::int64_t k, bool vnni) {
  const std::int64_t words = (k + 15) / 16 * 4;  // vectors of at most 16 values are stored whole
  // A row more than a multiple of 4 KiB: tiles' rows start in different cache sets.
  return (vnni ? words : 2 * words) + 16;
}

void quantize_rows(const Int8Linear& p, bool vnni, std::int64_t row, std::int64_t row_end, const Int8Rows& rows) {
  switch (p.type) {
    case ActivationType::kFloat32:
      return quantize_all<FloatRow, float>(p, vnni, row, row_end, rows);
    case ActivationType::kBFloat16:
      return quantize_all<HalfRow<HalfType::kBFloat16>, std::uint16_t>(p, vnni, row, row_end, rows);
    case ActivationType::kFloat16:
      return quantize_all<HalfRow<HalfType::kFloat16>, std::uint16_t>(p, vnni, row, row_end, rows);
  }
}

void range_of_rows(const Int8Linear& p, std::int64_t row, std::int64_t row_end, RowsRange& range) {
  switch (p.type) {
    case ActivationType::kFloat32:
      return range_all<FloatRow, float>(p, row, row_end, range);
    case ActivationType::kBFloat16:
      return range_all<HalfRow<HalfType::kBFloat16>, std::uint16_t>(p, row, row_end, range);
    case ActivationType::kFloat16:
      return range_all<HalfRow<HalfType::kFloat16>, std::uint16_t>(p, row, row_end, range);
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
