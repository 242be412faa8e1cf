// Rounding to int8, row by row. The values are those of torch's operators one after the other: a division, and rounding
// to nearest even.
//
// Roofline: the weight is read twice, the second time from L1 or L2.
#include <cstdint>
#include <cstring>

#include "kernels/cpu/quantize/int8_levels.h"
#include "kernels/cpu/quantize/vectors.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

typedef std::int8_t Bytes __attribute__((vector_size(N)));
typedef double Doubles __attribute__((vector_size(N * sizeof(double))));

constexpr float kLargest = 127.0f;

double sum_of(Doubles v) {
  double total = 0.0;
  for (int i = 0; i < N; ++i) total += v[i];
  return total;
}

template <class E>
void quantize_row(const Int8Quantization& p, std::int64_t row) {
  const auto* const from = static_cast<const typename E::type*>(p.weight) + row * p.stride;
  std::int8_t* const to = p.values + row * p.k;
  V most{};
  for (std::int64_t j = 0; j < p.k; j += N) most = larger(vecmath::vabs(E::part(from + j, p.k - j)), most);
  const float scale = largest_of(most) / kLargest;
  p.scales[row] = scale;
  double* const sums = p.sums + row * 2;
  Doubles wrong{}, whole{};
  for (std::int64_t j = 0; j < p.k; j += N) {
    const V x = E::part(from + j, p.k - j);
    V steps{};  // where the largest is subnormal the scale may be 0, and so is then the row
    if (scale != 0.0f) steps = larger(smaller(x / scale, V{} + kLargest), V{} - kLargest);
    steps = rounded(steps);
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(steps, I), Bytes);
    std::memcpy(to + j, &bytes, static_cast<std::size_t>(p.k - j < N ? p.k - j : N));
    const Doubles error = __builtin_convertvector(steps * scale - x, Doubles),
                  exact = __builtin_convertvector(x, Doubles);
    wrong += error * error, whole += exact * exact;
  }
  sums[0] = sum_of(wrong), sums[1] = sum_of(whole);
}

}  // namespace

void int8_rows(const Int8Quantization& p, std::int64_t row, std::int64_t row_end) {
  with_elements(p.dtype, [&](auto elements) {
    for (std::int64_t r = row; r < row_end; ++r) quantize_row<decltype(elements)>(p, r);
  });
}

}  // namespace untorch::kernels::UNTORCH_ISA
