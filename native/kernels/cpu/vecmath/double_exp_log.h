// exp and log families for doubles, within 1 ulp: Cody-Waite reduction and minimax polynomials, large terms summed with
// compensation (Fast2Sum).
//
// Branch-free; special values as in C's libm. Polynomials: scripts/fit_vecmath.py (exp_full, log_full).
#pragma once

#include "kernels/cpu/vecmath/float_exp_log.h"

namespace untorch::kernels::vecmath {
namespace {

inline constexpr double kExpFull[] = {0.5,
                                      0.16666666666666683,
                                      0.041666666666666095,
                                      0.0083333333333170474,
                                      0.0013888888889115449,
                                      0.00019841269896350283,
                                      2.4801586926852693e-5,
                                      2.7557234896200986e-6,
                                      2.7557581749098605e-7,
                                      2.511202465204125e-8,
                                      2.0826634707528859e-9};
// The same from r³ on.
inline constexpr double kExpTail[] = {
    0.16666666666666683,   0.041666666666666095,  0.0083333333333170474, 0.0013888888889115449, 0.00019841269896350283,
    2.4801586926852693e-5, 2.7557234896200986e-6, 2.7557581749098605e-7, 2.511202465204125e-8,  2.0826634707528859e-9};
inline constexpr double kLogFull[] = {
    0.33333333333333184,   -0.24999999999999022,  0.20000000000069398,   -0.16666666666959502,  0.14285714274906035,
    -0.12499999966469125,  0.11111111931529543,   -0.10000002011693462,  0.090908736526228817,  -0.083332614876064903,
    0.076932470126445296,  -0.071444805833228483, 0.066508875935153734,  -0.062262351535695012, 0.060500780946592299,
    -0.057792807066637278, 0.041822553612319729,  -0.037080489464877067, 0.084878520596213265,  -0.085618418330539382};
// 32 bits, so that products with an exponent are exact, and the rest.
inline constexpr double kLog2High = 0x1.62e42fee00000p-1, kLog2Low = 0x1.a39ef35793c76p-33;
inline constexpr double kLog10Of2High = 0x1.3441350800000p-2, kLog10Of2Low = 0x1.f79fef311f12bp-34;

UNTORCH_VECMATH_INLINE Double2 fused(Double2 a, Double2 b, Double2 c) {
  // No FMA instruction at this level: the scalar function, which rounds once as well.
  return Double2{__builtin_fma(a[0], b[0], c[0]), __builtin_fma(a[1], b[1], c[1])};
}
#if defined(__FMA__)
UNTORCH_VECMATH_INLINE Double4 fused(Double4 a, Double4 b, Double4 c) {
  return (Double4)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#endif
#if defined(__AVX512F__)
UNTORCH_VECMATH_INLINE Double8 fused(Double8 a, Double8 b, Double8 c) {
  return (Double8)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#endif

// A little above where sinh and cosh overflow (710.4759); a quarter of its power of two, 2^1023, is the largest there
// is.
inline constexpr double kOverflow = 710.49;

// high + low, low at most half an ulp of high.
template <class D>
struct Sum {
  D high, low;
};
// |a| >= |b|, or a = 0.
template <class D>
UNTORCH_VECMATH_INLINE Sum<D> fast_sum(D a, D b) {
  const D high = a + b;
  return {high, b - (high - a)};
}
template <class D>
UNTORCH_VECMATH_INLINE Sum<D> exact_sum(D a, D b) {
  const D high = a + b;
  const D b_part = high - a;
  return {high, (a - (high - b_part)) + (b - b_part)};
}
template <class D>
UNTORCH_VECMATH_INLINE D absolutely_below(D x, double low, double high) {
  x = x > high ? splat<D>(high) : x;
  return x < low ? splat<D>(low) : x;
}

// x = k·log(2) + r + rest, k from the magic sum `shifted`.
template <class D>
UNTORCH_VECMATH_INLINE void exp_reduce(D x, D& shifted, D& r, D& rest) {
  shifted = x * 1.4426950408889634 + kRoundMagic;
  const D k = shifted - kRoundMagic;
  const D high = x - k * kLog2High;  // exact
  const D low = k * kLog2Low;
  r = high - low;
  rest = (high - r) - low;
}

// 2^k·e^(r + rest); two scalings, so that subnormal results round once and 2^1024 is reached.
template <class D>
UNTORCH_VECMATH_INLINE D exp_assemble(D shifted, D r, D rest) {
  const Sum<D> sum = fast_sum<D>(splat<D>(1.0), r);
  const D y = sum.high + (r * r * polynomial(r, kExpFull) + (sum.low + rest));
  const D k = shifted - kRoundMagic;
  const D first = truncate(k * 0.5);
  return y * power_of_two<D>(first + kRoundMagic) * power_of_two<D>((k - first) + kRoundMagic);
}

template <class D>
UNTORCH_VECMATH_INLINE D exp_double(D x) {
  D shifted, r, rest;
  exp_reduce(absolutely_below(x, -760.0, 720.0), shifted, r, rest);
  return exp_assemble(shifted, r, rest);
}
template <class D>
UNTORCH_VECMATH_INLINE D exp2_double(D x) {
  x = absolutely_below(x, -1100.0, 1030.0);
  const D shifted = x + kRoundMagic;
  const D fraction = x - (shifted - kRoundMagic);
  const D log2 = splat<D>(0x1.62e42fefa39efp-1);
  const D r = fraction * log2;
  return exp_assemble<D>(shifted, r, fused(fraction, log2, -r) + fraction * 0x1.abc9e3b39803fp-56);
}

// (eˣ − 1)/4 as a sum, for −50 <= x <= kOverflow: quarters, so that sinh and cosh reach the overflow.
template <class D>
UNTORCH_VECMATH_INLINE Sum<D> expm1_quarter(D x) {
  D shifted, r, rest;
  exp_reduce(x, shifted, r, rest);
  const D scale = power_of_two<D>(shifted - 2.0);
  // r²/2 counts for as much as r where 2^k·e^r is near 1: it is compensated too.
  const D half_square = 0.5 * r * r;
  const D rounding = fused(0.5 * r, r, -half_square);
  const D tail = rounding + (r * (r * r) * polynomial(r, kExpTail) + rest);
  const Sum<D> start = exact_sum<D>(scale, splat<D>(-0.25));
  const Sum<D> first = exact_sum<D>(start.high, r * scale);
  const Sum<D> second = exact_sum<D>(first.high, half_square * scale);
  return fast_sum<D>(second.high, tail * scale + (second.low + (first.low + start.low)));
}

template <class D>
UNTORCH_VECMATH_INLINE D expm1_double(D x) {
  const Sum<D> quarter = expm1_quarter(absolutely_below(x, -50.0, kOverflow));
  return magnitude_of(x) < 1e-16 ? x : 4.0 * quarter.high;
}
// q = a/b for double-doubles a and b, and its remainder.
template <class D>
UNTORCH_VECMATH_INLINE Sum<D> quotient(Sum<D> a, Sum<D> b) {
  const D inverse = 1.0 / b.high;
  const D q = a.high * inverse;
  return {q, (fused(-q, b.high, a.high) + (a.low - q * b.low)) * inverse};
}
template <class D>
UNTORCH_VECMATH_INLINE D tanh_double(D x) {
  const D a = magnitude_of(x);
  const Sum<D> u = expm1_quarter<D>(2.0 * absolutely_below(a, 0.0, 20.0));  // tanh = u/(u + 1/2)
  const Sum<D> below = exact_sum<D>(u.high, splat<D>(0.5));
  const Sum<D> q = quotient<D>(u, {below.high, below.low + u.low});
  return a < 1e-16 ? x : with_sign<D>(q.high + q.low, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D sinh_double(D x) {
  const D a = magnitude_of(x);
  const Sum<D> u = expm1_quarter(absolutely_below(a, 0.0, kOverflow));
  // (u + u/(4u + 1))·2; the second term no longer counts from 40 on, where 4u might overflow.
  const Sum<D> below = exact_sum<D>(4.0 * u.high, splat<D>(1.0));
  const Sum<D> q = quotient<D>(u, {below.high, below.low + 4.0 * u.low});
  const Sum<D> sum = fast_sum<D>(u.high, q.high);
  const D full = 2.0 * (a > 40.0 ? u.high : sum.high + (sum.low + (u.low + q.low)));
  return a < 1e-16 ? x : with_sign<D>(full, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D cosh_double(D x) {
  const D a = absolutely_below(magnitude_of(x), 0.0, kOverflow);
  const Sum<D> u = expm1_quarter(a);
  const Sum<D> e = exact_sum<D>(u.high, splat<D>(0.25));  // e^a/4
  const Sum<D> full = {e.high, e.low + u.low};
  const Sum<D> q = quotient<D>({splat<D>(0.0625), D{}}, full);
  const Sum<D> sum = fast_sum<D>(full.high, q.high);
  return 2.0 * (a > 40.0 ? full.high : sum.high + (sum.low + (full.low + q.low)));
}

// x = (1 + f)·2^k, x > 0, subnormal too.
template <class D>
UNTORCH_VECMATH_INLINE void split_any(D x, D& f, D& k) {
  const Long<D> small = x < 2.2250738585072014e-308;
  split<D>(small ? x * 18014398509481984.0 : x, f, k);
  k = small ? k - 54.0 : k;
}
// log(1 + f) − f.
template <class D>
UNTORCH_VECMATH_INLINE D log1p_tail(D f) {
  const D square = f * f;
  return square * (f * polynomial(f, kLogFull)) - 0.5 * square;
}
// k·(high + low) + log(1 + f)·factor, the factor in two parts.
template <class D>
UNTORCH_VECMATH_INLINE D log_scaled(D f, D k, double high, double low, double factor, double factor_low) {
  const Sum<D> log = fast_sum<D>(f, log1p_tail(f));
  const D product = log.high * factor;
  const D product_low = fused(log.high, splat<D>(factor), -product) + (log.low * factor + log.high * factor_low);
  const Sum<D> sum = fast_sum<D>(k * high, product);
  return sum.high + (sum.low + (product_low + k * low));
}

template <class D>
UNTORCH_VECMATH_INLINE D log_double(D x) {
  D f, k;
  split_any(x, f, k);
  const Sum<D> sum = fast_sum<D>(k * kLog2High, f);
  return log_special<D>(x, sum.high + (sum.low + (log1p_tail(f) + k * kLog2Low)));
}
template <class D>
UNTORCH_VECMATH_INLINE D log2_double(D x) {
  D f, k;
  split_any(x, f, k);
  return log_special<D>(x, log_scaled(f, k, 1.0, 0.0, 0x1.71547652b82fep+0, 0x1.777d0ffda0d24p-56));
}
template <class D>
UNTORCH_VECMATH_INLINE D log10_double(D x) {
  D f, k;
  split_any(x, f, k);
  return log_special<D>(x, log_scaled(f, k, kLog10Of2High, kLog10Of2Low, 0x1.bcb7b1526e50ep-2, 0x1.95355baaafad3p-57));
}
// log of the rounded 1 + x, plus the rounding error divided by 1 + x.
template <class D>
UNTORCH_VECMATH_INLINE D log1p_double(D x) {
  const D one_plus = x + 1.0;
  D f, k;
  split(one_plus, f, k);
  const Sum<D> lost = exact_sum<D>(splat<D>(1.0), x);
  const Long<D> near = k == 0.0;
  f = near ? x : f;
  const D correction = near ? D{} : lost.low / one_plus;
  const Sum<D> sum = fast_sum<D>(k * kLog2High, f);
  const D result = sum.high + (sum.low + (log1p_tail(f) + (k * kLog2Low + correction)));
  return magnitude_of(x) < 1e-16 ? x : log_special<D>(one_plus, result);
}

}  // namespace
}  // namespace untorch::kernels::vecmath
