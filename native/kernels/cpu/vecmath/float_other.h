// erf, erfc, fmod, hypot, nextafter and lgamma for floats, on double lanes (see float_exp_log.h).
#pragma once

#include <math.h>

#include "kernels/cpu/vecmath/float_exp_log.h"

namespace untorch::kernels::vecmath {
namespace {

inline constexpr double kErfSmallMid[] = {0.12837916708166925,    -0.37612638705784129,  0.11283787015671873,
                                          -0.026865749495080608,  0.0052220930159331057, -0.00085020916525477913,
                                          0.00011416706101298457, -1.0160483335959365e-5};
inline constexpr double kErfLargeMid[] = {-0.00018034886369741132, 1.12954217441465,      0.6332918112332677,
                                          0.10834077029927403,     -0.025158710311749388, 0.0041860012620184294,
                                          -0.000437550690277686,   2.1362649272805343e-5};
// erfc(x)·exp(x²) in t = 1/(x + 1.5).
inline constexpr double kErfcxMid[] = {-3.2036327649180385e-7, 0.56420659799408711, 0.84591152200447845,
                                       0.99150972683598557,    0.61343901152861948, -0.56344805465610528,
                                       -0.83161080975806145,   -10.032327734880018, 31.791354945697792,
                                       -35.885526564375503,    15.068982405717111};
inline constexpr double kErfSplit = 0.9375;

template <class D>
UNTORCH_VECMATH_INLINE D erf_mid(D x) {
  const D a = magnitude_of(x);
  const D square = x * x;
  const D small = a * polynomial(square, kErfSmallMid) + a;
  const D large = 1.0 - exp_mid<D>(-polynomial(clamp(a, 4.0), kErfLargeMid));
  return with_sign<D>(a < kErfSplit ? small : large, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D erfc_mid(D x) {
  const D a = clamp(magnitude_of(x), 11.0);
  const D square = a * a;
  const D small = a * polynomial(square, kErfSmallMid) + a;
  const D tail = exp_mid<D>(-square) * polynomial<D>(1.0 / (a + 1.5), kErfcxMid);
  const D near = 1.0 - with_sign(small, sign_of(x));
  const D far = x < 0.0 ? 2.0 - tail : tail;
  return a < kErfSplit ? near : far;
}

// x − trunc(x/y)·y is exact in double while the quotient is below 2^28; beyond, and for the special values, fmodf.
template <class D>
UNTORCH_VECMATH_INLINE D fmod_mid(D x, D y) {
  const D a = magnitude_of(x), b = magnitude_of(y);
  const D quotient = a / b;
  D result = a - truncate(quotient) * b;
  result = with_sign(a < b ? a : result, sign_of(x));
  const Long<D> hard = ~(quotient < 268435456.0);
  if (__builtin_expect(any(hard), 0)) {
    for (unsigned i = 0; i < sizeof(D) / sizeof(double); ++i) {
      if (hard[i]) result[i] = __builtin_fmod(x[i], y[i]);
    }
  }
  return result;
}

// The squares are exact in double and their sum and its root each round once.
template <class D>
UNTORCH_VECMATH_INLINE D hypot_mid(D x, D y) {
  const D a = magnitude_of(x), b = magnitude_of(y);
  const D result = square_root(x * x + y * y);
  return (a == infinity<D>()) | (b == infinity<D>()) ? infinity<D>() : result;
}

template <class F, class I, class Word>
UNTORCH_VECMATH_INLINE F nextafter_bits(F x, F y, Word sign_bit) {
  const I up = (y > x) == (x > F{});  // away from zero
  const I moved = (I)x + ((up & 2) - 1);
  const I from_zero = ((I)y & sign_bit) | 1;
  F result = (F)(x == F{} ? from_zero : moved);
  result = x == y ? y : result;
  return (x != x) | (y != y) ? x + y : result;
}

// The sign of gamma is not asked for; the _r forms keep it out of the global.
[[gnu::noinline]] inline double lgamma_scalar(double x) {
  int sign = 0;
  return lgamma_r(x, &sign);
}

}  // namespace
}  // namespace untorch::kernels::vecmath
