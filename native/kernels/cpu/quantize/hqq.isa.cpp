// Half-quadratic quantization (Badri and Shaji, 2023): a group's scale is rounding-to-nearest's, its zero minimises a
// p-norm of the error, p = 0.7.
//
// With s = 1 / scale and z = 8 - zero / scale, an iteration is
//   q = clamp(round(w·s + z), 0, 15),  e = w - (q - z) / s,  z = mean(q - (w - shrink(e))·s)
// where shrink(x) = sign(x)·max(|x| - |x|^(p - 1) / beta, 0), and beta grows. A group stops when its mean absolute
// error no longer falls, and keeps its best z. One pass over the group, which lies in L1, gives the error of the
// present z and the next z. The power is computed only where it matters: below |x|^(2 - p) = 1 / beta, 0.17 at first,
// shrink is 0, and weights of most layers have no error that large.
//
// Roofline: 12 operations a value and iteration, in registers; five iterations on average.
#include <cstdint>

#include "kernels/cpu/quantize/hqq_levels.h"
#include "kernels/cpu/quantize/vectors.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr float kLevels = 15.0f, kMiddle = 8.0f;
constexpr float kPower = -0.3f;  // p - 1
constexpr float kBeta = 10.0f, kGrowth = 1.01f;
constexpr int kIterations = 20;
// Where as many errors are above 0 as below, another zero has the same mean error, but for rounding.
constexpr float kFalls = 1.0f - 0x1p-20f;
constexpr float kLeastScale = 0x1p-126f;  // its reciprocal is finite

[[gnu::always_inline]] inline bool any_of(I mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  std::int32_t found = 0;
  for (int i = 0; i < N; ++i) found |= mask[i];
  return found != 0;
#endif
}

struct Step {
  float error, z;  // the mean absolute error of the present z, and the next z
};

// `count` values, of which the buffer has whole vectors, zeros behind them. `first`: above it shrink(e) is not 0.
Step step(const float* w, std::int64_t count, float scale, float s, float z, float beta, float first) {
  V sizes{}, next{};
  const auto see = [&](V x, I inside) __attribute__((always_inline)) {
    const V scaled = x * s;
    V q = larger(smaller(scaled + z, V{} + kLevels), V{});
    q = rounded(q);
    const V e = (V)((I)(x - (q - z) * scale) & inside), size = vecmath::vabs(e);
    sizes += size;
    next += (V)((I)(q - scaled) & inside);
    const I large = size > first;
    if (any_of(large)) [[unlikely]] {
      const V kept = larger(size - vecmath::vexp(vecmath::vlog(larger(size, V{} + kLeastScale)) * kPower) / beta, V{});
      const I sign = (I)e & INT32_MIN;
      next += (V)(((I)kept | sign) & large) * s;
    }
  };
  std::int64_t j = 0;
  const I all = I{} - 1;
  for (; j + N <= count; j += N) see(load(w + j), all);
  if (j < count) {
    I inside{};
    for (std::int64_t x = 0; x < count - j; ++x) inside[x] = -1;
    see(load(w + j), inside);
  }
  const float n = static_cast<float>(count);
  return {sum_of(sizes) / n, sum_of(next) / n};
}

void quantize_group(const float* w, std::int64_t count, float* out) {
  float low, high;
  find_range(w, count, low, high);
  const float scale = (high - low) / kLevels, zero = low + kMiddle * scale;
  out[0] = scale, out[1] = zero;
  if (scale < kLeastScale) return;  // equal values: the zero holds them
  const float s = 1.0f / scale;
  float z = __builtin_rintf(kMiddle - zero * s), best = z, least = __builtin_inff(), beta = kBeta;
  // beta^(-1 / (2 - p)), and a little less; it falls by a factor an iteration.
  float first = 0.17f;
  for (int i = 0; i < kIterations; ++i) {
    const Step now = step(w, count, scale, s, z, beta, first);
    if (!(now.error < least * kFalls)) break;
    least = now.error, best = z, z = now.z;
    beta *= kGrowth, first *= 0.9923f;
  }
  out[1] = (kMiddle - best) * scale;
}

}  // namespace

void hqq_rows(const Hqq& p, std::int64_t row, std::int64_t row_end) {
  alignas(64) float part[kHqqMostGroup + N];
  for (std::int64_t r = row; r < row_end; ++r) {
    const float* const from = p.weight + r * p.stride;
    for (std::int64_t g = 0; g < p.groups; ++g) {
      float* const out = p.out + (r * p.groups + g) * 2;
      const std::int64_t at = g * p.group;
      const std::int64_t count = p.k - at < p.group ? p.k - at : p.group;
      out[0] = 0.0f, out[1] = 0.0f;
      if (count <= 0) continue;
      for (std::int64_t j = 0; j < count; ++j) part[j] = from[at + j];
      for (int j = 0; j < N; ++j) part[count + j] = 0.0f;
      quantize_group(part, count, out);
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
