// exp and log families on double lanes, to about 2^-32: what float functions need to round within 0.51 ulp.
//
// Arguments are floats widened to double, so nothing under- or overflows on the way, and no double-double is needed.
// Polynomials: scripts/fit_vecmath.py (exp_mid, log_mid, log_fine).
#pragma once

#include "kernels/cpu/vecmath/vector.h"

namespace untorch::kernels::vecmath {
namespace {

inline constexpr double kExpMid[] = {0.5000000040094164,    0.16666665925101932,   0.041666372818444894,
                                     0.0083335075617465932, 0.0013939880136791725, 0.00019775715806566392};
inline constexpr double kLogMid[] = {0.33333333147998033,  -0.25000007240191343,  0.20000033364800766,
                                     -0.16665922152753614, 0.14283847807503334,   -0.12526500404328359,
                                     0.11157845623133911,  -0.095777205335357041, 0.085113278886954333,
                                     -0.11361468395765101, 0.11097132948573962};
inline constexpr double kLogFine[] = {
    0.33333333337650647,  -0.25000000020284773,  0.19999998948289708,   -0.16666663473291284, 0.14285797863776846,
    -0.12500187384126335, 0.11108018516316916,   -0.099945010105629523, 0.091512212521809389, -0.084222198303485883,
    0.070583622368298504, -0.063456740648760897, 0.09978650180536849,   -0.098679181895134555};

// x between −limit and limit; NaN stays.
template <class D>
UNTORCH_VECMATH_INLINE D clamp(D x, double limit) {
  x = x > limit ? splat<D>(limit) : x;
  return x < -limit ? splat<D>(-limit) : x;
}

// 2^k for the integer in shifted = k + kRoundMagic.
template <class D>
UNTORCH_VECMATH_INLINE D power_of_two(D shifted) {
  return (D)(((Long<D>)shifted - kRoundMagicBits + 1023) << 52);
}

// e^r − 1 for |r| <= log(2)/2.
template <class D>
UNTORCH_VECMATH_INLINE D expm1_reduced(D r) {
  return r * r * polynomial(r, kExpMid) + r;
}

template <class D>
UNTORCH_VECMATH_INLINE D exp_mid(D x) {
  x = clamp(x, 300.0);  // far beyond what a float holds
  const D shifted = x * 1.4426950408889634 + kRoundMagic;
  const D r = x - (shifted - kRoundMagic) * 0.6931471805599453;
  return (expm1_reduced(r) + 1.0) * power_of_two(shifted);
}
template <class D>
UNTORCH_VECMATH_INLINE D exp2_mid(D x) {
  x = clamp(x, 400.0);
  const D shifted = x + kRoundMagic;
  return (expm1_reduced((x - (shifted - kRoundMagic)) * 0.6931471805599453) + 1.0) * power_of_two(shifted);
}
// 2^k·(e^r − 1) + (2^k − 1): for k = 0 the polynomial itself, with no cancellation.
template <class D>
UNTORCH_VECMATH_INLINE D expm1_mid(D x) {
  const D clamped = clamp(x, 300.0);
  const D shifted = clamped * 1.4426950408889634 + kRoundMagic;
  const D scale = power_of_two(shifted);
  const D result = expm1_reduced(clamped - (shifted - kRoundMagic) * 0.6931471805599453) * scale + (scale - 1.0);
  return x == 0.0 ? x : result;
}

template <class D>
UNTORCH_VECMATH_INLINE D sinh_mid(D x) {
  const D u = expm1_mid(magnitude_of(x));
  return with_sign<D>(0.5 * (u + u / (u + 1.0)), sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D cosh_mid(D x) {
  const D e = exp_mid(magnitude_of(x));
  return 0.5 * (e + 1.0 / e);
}
template <class D>
UNTORCH_VECMATH_INLINE D tanh_mid(D x) {
  const D u = expm1_mid(2.0 * clamp(magnitude_of(x), 30.0));
  return with_sign<D>(u / (u + 2.0), sign_of(x));
}

// log(1 + f) by its series' first two terms and a fitted rest, |f| <= 1/3.
template <class D, int N>
UNTORCH_VECMATH_INLINE D log1p_reduced(D f, const double (&coefficients)[N]) {
  const D square = f * f;
  return square * (f * polynomial(f, coefficients) - 0.5) + f;
}

// x = (1 + f)·2^k with 1 + f in [2/3, 4/3); x > 0, normal.
template <class D>
UNTORCH_VECMATH_INLINE void split(D x, D& f, D& k) {
  constexpr std::int64_t kTwoThirds = 0x3fe5555555555555;
  // Keeps the shifted number positive for every exponent, −1022 to 1024.
  constexpr std::int64_t kOffset = std::int64_t{1023} << 52;
  typedef Long<D> L;
  const L shifted = (L)x - kTwoThirds + kOffset;
  const L biased = (shifted & ~((std::int64_t{1} << 52) - 1)) - kOffset;
  f = (D)((L)x - biased) - 1.0;
  const L exponent = (shifted >> 52) - 1023;
  k = to_double<D>(exponent);
}

// The special values that log, log2 and log10 share.
template <class D>
UNTORCH_VECMATH_INLINE D log_special(D x, D result) {
  result = x == infinity<D>() ? x : result;
  result = x == 0.0 ? -infinity<D>() : result;
  return x >= 0.0 ? result : not_a_number<D>();
}

template <class D>
UNTORCH_VECMATH_INLINE D log2_mid(D x) {
  D f, k;
  split(x, f, k);
  return log_special<D>(x, log1p_reduced(f, kLogMid) * 1.4426950408889634 + k);
}
template <class D>
UNTORCH_VECMATH_INLINE D log10_mid(D x) {
  D f, k;
  split(x, f, k);
  return log_special<D>(x, log1p_reduced(f, kLogMid) * 0.4342944819032518 + k * 0.30102999566398120);
}
template <class D>
UNTORCH_VECMATH_INLINE D log_fine(D x) {
  D f, k;
  split(x, f, k);
  return log_special<D>(x, log1p_reduced(f, kLogFine) + k * 0.6931471805599453);
}
// x itself where 1 + x needs no scaling: small x lose nothing.
template <class D>
UNTORCH_VECMATH_INLINE D log1p_mid(D x) {
  D f, k;
  const D sum = x + 1.0;
  split(sum, f, k);
  f = k == 0.0 ? x : f;
  const D result = log_special<D>(sum, log1p_reduced(f, kLogMid) + k * 0.6931471805599453);
  return x == 0.0 ? x : result;
}

template <class D>
UNTORCH_VECMATH_INLINE D atanh_mid(D x) {
  const D a = magnitude_of(x);
  return with_sign<D>(0.5 * log1p_mid<D>((a + a) / (1.0 - a)), sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D asinh_mid(D x) {
  const D a = magnitude_of(x);
  const D result = log1p_mid<D>(a + a * a / (square_root(a * a + 1.0) + 1.0));
  return with_sign<D>(a == infinity<D>() ? a : result, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D acosh_mid(D x) {
  const D t = x - 1.0;
  const D result = log1p_mid<D>(t + square_root(t * t + 2.0 * t));
  return x >= 1.0 ? result : not_a_number<D>();
}

template <class D>
UNTORCH_VECMATH_INLINE D pow_mid(D x, D y) {
  typedef Long<D> L;
  const D a = magnitude_of(x);
  D result = exp_mid<D>(y * log_fine<D>(a));
  const D half = y * 0.5;
  const L integer = truncate(y) == y;
  const L odd = integer & (truncate(half) != half);
  result = (x < 0.0) & ~integer & (a != infinity<D>()) & (y == y) ? not_a_number<D>() : result;
  result = with_sign<D>(result, sign_of(x) & odd);
  const L one = (y == 0.0) | (x == 1.0) | ((a == 1.0) & (magnitude_of(y) == infinity<D>()));
  return one ? splat<D>(1.0) : result;
}

}  // namespace
}  // namespace untorch::kernels::vecmath
