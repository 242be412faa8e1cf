// Rounding to NVFP4, block by block.
//
// Rounding to nearest gives a block the scale that makes its largest value 6. The search tries the scales of E4M3
// around that one too, as clipping the largest value, or placing it at 4, can be better for the others. Candidates are
// compared in float32; float64 has the last word between the best one and the first, so that the search is never worse.
//
// A size is rounded in three ranges: up to 2 values of E2M1 are 0.5 apart, up to 4 they are 1 apart, up to 6, 2. With
// low, middle and high the steps in each, the value is low / 2 + middle + 2·high - 6 and the code low + middle + high
// - 4. Even steps have even codes in all of them, so rounding a half to even takes a tie to the even mantissa.
//
// Roofline: a division and 20 operations a value and candidate, in registers; nine candidates.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/quantize/nvfp4_levels.h"
#include "kernels/cpu/quantize/vectors.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int kParts = static_cast<int>(kNvfp4Block) / N;
typedef std::uint8_t Bytes __attribute__((vector_size(N)));

constexpr float kE2m1Max = 6.0f, kE4m3Max = 448.0f, kE4m3Least = 0x1p-9f;
constexpr int kE4m3MaxCode = 126;
constexpr int kSteps[] = {-2, -1, 1, 2, 3, 4, 5, 6};  // above the largest value becomes 4: 1.5 times, 4 or 5 steps

struct Block {
  V parts[kParts];
};
struct Rounded {
  V value, code;
};

// size / scale in E2M1.
[[gnu::always_inline]] inline Rounded round_sizes(V size, float scale) {
  const V quotient = size / (scale > kE4m3Least ? scale : kE4m3Least);  // blocks of zeros have the scale 0
  const V low = rounded(smaller(quotient, V{} + 2.0f) * 2.0f);
  const V middle = rounded(smaller(larger(quotient, V{} + 2.0f), V{} + 4.0f));
  const V high = rounded(smaller(larger(quotient, V{} + 4.0f), V{} + kE2m1Max) * 0.5f);
  return {low * 0.5f + middle + high * 2.0f - 6.0f, low + middle + high - 4.0f};
}

float squared_error(const Block& sizes, float scale) {
  V total{};
  for (const V size : sizes.parts) {
    const V error = round_sizes(size, scale).value * scale - size;
    total += error * error;
  }
  return sum_of(total);
}

// Of a scale from 0 to the largest of E4M3, ties to even.
int code_of(float scale) {
  if (scale < 0x1p-6f) return static_cast<int>(std::nearbyint(scale * 512.0f));
  std::uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  bits += 0x7ffffu + (bits >> 20 & 1u);
  return static_cast<int>(bits >> 20) - (120 << 3);
}
float scale_of(int code) {
  if (code < 8) return static_cast<float>(code) * kE4m3Least;
  const std::uint32_t bits = static_cast<std::uint32_t>(code + (120 << 3)) << 20;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return scale;
}

int search(const Block& sizes, int nearest) {
  int best = nearest;
  float least = squared_error(sizes, scale_of(nearest));
  for (const int step : kSteps) {
    const int code = nearest + step < 1 ? 1 : nearest + step > kE4m3MaxCode ? kE4m3MaxCode : nearest + step;
    const float error = squared_error(sizes, scale_of(code));
    if (error < least) best = code, least = error;
  }
  return best;
}

// The values that a block has with a scale, without it and the global one: values · scale is exact in float32.
void restore(const Block& sizes, float scale, float* values) {
  for (int i = 0; i < kParts; ++i) store(values + i * N, round_sizes(sizes.parts[i], scale).value * scale);
}

template <class E>
void quantize_row(const Nvfp4Quantization& p, std::int64_t row) {
  const auto* const from = static_cast<const typename E::type*>(p.weight) + row * p.stride;
  const float world = p.global_scale[row];
  double* const sums = p.sums + row * 3;
  sums[0] = 0.0, sums[1] = 0.0, sums[2] = 0.0;
  for (std::int64_t b = 0; b < p.blocks; ++b) {
    Block sizes;
    alignas(64) float part[kNvfp4Block], first[kNvfp4Block], chosen[kNvfp4Block];
    V most{};
    for (int i = 0; i < kParts; ++i) {
      const std::int64_t at = b * kNvfp4Block + i * N, count = p.k - at;
      const V x = count <= 0 ? V{} : E::part(from + at, count);
      store(part + i * N, x);
      sizes.parts[i] = vecmath::vabs(x / world);
      most = larger(sizes.parts[i], most);
    }
    const float largest = largest_of(most);
    int nearest = 0;
    if (largest != 0.0f) {
      const float scale = largest / kE2m1Max;
      nearest = code_of(scale < kE4m3Least ? kE4m3Least : scale > kE4m3Max ? kE4m3Max : scale);
    }
    int code = p.search ? search(sizes, nearest) : nearest;
    restore(sizes, scale_of(nearest), first);
    restore(sizes, scale_of(code), chosen);
    if (code != nearest) {
      double better = 0.0, without = 0.0;
      for (int i = 0; i < kNvfp4Block; ++i) {
        const double exact = std::fabs(static_cast<double>(part[i])) / static_cast<double>(world);
        const double a = static_cast<double>(chosen[i]) - exact, c = static_cast<double>(first[i]) - exact;
        better += a * a, without += c * c;
      }
      if (!(better < without)) code = nearest, std::memcpy(chosen, first, sizeof chosen);
    }
    for (int i = 0; i < kNvfp4Block; ++i) {
      const double size = std::fabs(static_cast<double>(part[i]));
      const double a = static_cast<double>(chosen[i]) * static_cast<double>(world) - size;
      const double c = static_cast<double>(first[i]) * static_cast<double>(world) - size;
      sums[0] += a * a, sums[1] += c * c, sums[2] += size * size;
    }
    std::uint8_t codes[kNvfp4Block];
    for (int i = 0; i < kParts; ++i) {
      const Bytes bytes =
          __builtin_convertvector(__builtin_convertvector(round_sizes(sizes.parts[i], scale_of(code)).code, I), Bytes);
      std::memcpy(codes + i * N, &bytes, sizeof bytes);
    }
    std::uint8_t* const packed = p.packed + (row * p.blocks + b) * (kNvfp4Block / 2);
    const auto coded = [&](int i) {  // zeros have no sign
      return static_cast<unsigned>(codes[i]) | (part[i] < 0.0f && codes[i] > 0 ? 8u : 0u);
    };
    for (int i = 0; i < kNvfp4Block / 2; ++i) {
      packed[i] = static_cast<std::uint8_t>(coded(2 * i) | coded(2 * i + 1) << 4);
    }
    p.block_scale[row * p.blocks + b] = static_cast<std::uint8_t>(code);
  }
}

}  // namespace

void nvfp4_rows(const Nvfp4Quantization& p, std::int64_t row, std::int64_t row_end) {
  with_elements(p.dtype, [&](auto elements) {
    for (std::int64_t r = row; r < row_end; ++r) quantize_row<decltype(elements)>(p, r);
  });
}

}  // namespace untorch::kernels::UNTORCH_ISA
