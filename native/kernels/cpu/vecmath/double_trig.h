// sin and cos for doubles, within 1 ulp: compensated Cody-Waite reduction, and minimax polynomials on [−π/4, π/4].
//
// Arguments beyond 10⁶, and the rare ones that lie so near a multiple of π/2 that three parts of π/2 are not enough,
// take the scalar functions. Polynomials: scripts/fit_vecmath.py (sin_full, cos_full).
#pragma once

#include "kernels/cpu/vecmath/double_exp_log.h"
#include "kernels/cpu/vecmath/float_trig.h"

namespace untorch::kernels::vecmath {
namespace {

inline constexpr double kSinFull[] = {-0.16666666666666667,   0.0083333333333333228,  -0.00019841269841255129,
                                      2.755731921422283e-6,   -2.5052104920204065e-8, 1.6058367746608114e-10,
                                      -7.5787543673163444e-13};
inline constexpr double kCosFull[] = {0.041666666666666667,  -0.0013888888888888874, 2.4801587301571534e-5,
                                      -2.755731921539199e-7, 2.0876754369766724e-9,  -1.1470293672798928e-11,
                                      4.7381272683427659e-14};

template <Trig kWhich, class D>
UNTORCH_VECMATH_INLINE D trig_double(D x) {
  const D shifted = x * 0.63661977236758134 + kRoundMagic;
  const D k = shifted - kRoundMagic;
  const D first = x - k * kHalfPiHigh;  // exact, as is the next product
  const D middle = k * kHalfPiMiddle;
  const D second = first - middle;
  const D second_lost = (first - second) - middle;
  const D last = k * kHalfPiLow;
  const D r = second - last;
  const D rest = ((second - r) - last) + second_lost;

  const D square = r * r;
  const D half_square = 0.5 * square;
  const D near_one = 1.0 - half_square;
  const D sine = r + (r * square * polynomial(square, kSinFull) + rest * near_one);
  const D square_lost = fused(r, r, -square);  // as large as a quarter ulp of the cosine
  const D cosine = near_one + (((1.0 - near_one) - half_square) +
                               (square * square * polynomial(square, kCosFull) - (r * rest + 0.5 * square_lost)));

  const Long<D> quadrant = (Long<D>)shifted;
  const Long<D> odd = (quadrant & 1) != 0;
  D result;
  if constexpr (kWhich == Trig::kSin) {
    result = (D)((Long<D>)(odd ? cosine : sine) ^ ((quadrant & 2) << 62));
    result = x == 0.0 ? x : result;
  } else {
    result = (D)((Long<D>)(odd ? sine : cosine) ^ (((quadrant + 1) & 2) << 62));
  }
  const Long<D> hard = (magnitude_of(x) > kReducible) | ((magnitude_of(r) < 0x1p-30) & (k != 0.0));
  if (__builtin_expect(any(hard), 0)) {
    for (unsigned i = 0; i < sizeof(D) / sizeof(double); ++i) {
      if (hard[i]) result[i] = trig_large<kWhich>(x[i]);
    }
  }
  return result;
}

template <class D>
UNTORCH_VECMATH_INLINE D sin_double(D x) {
  return trig_double<Trig::kSin>(x);
}
template <class D>
UNTORCH_VECMATH_INLINE D cos_double(D x) {
  return trig_double<Trig::kCos>(x);
}

}  // namespace
}  // namespace untorch::kernels::vecmath
