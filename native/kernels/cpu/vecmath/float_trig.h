// sin, cos, tan and their inverses on double lanes, to about 2^-32, for float functions (see float_exp_log.h).
#pragma once

#include "kernels/cpu/vecmath/float_exp_log.h"

namespace untorch::kernels::vecmath {
namespace {

inline constexpr double kSinMid[] = {-0.16666666641615543, 0.0083333293845945924, -0.00019839334419411001,
                                     2.7183075238730853e-6};
inline constexpr double kCosMid[] = {0.041666666622809184, -0.0013888883751743977, 2.479951956322037e-5,
                                     -2.7210200624857406e-7};
inline constexpr double kAtanMid[] = {
    -0.33333333295963547,   0.19999996880162139,   -0.14285622909607754,   0.11109754718455744,   -0.090789171457729533,
    0.076231776544275373,   -0.063914893690257839, 0.050952538802684123,   -0.035937628405332654, 0.020548638030666512,
    -0.0086023212596567313, 0.0022867574065705543, -0.00028548650565724654};
inline constexpr double kAsinMid[] = {0.1666666666969489,   0.074999995256907636,   0.044643112432411163,
                                      0.030375233965397494, 0.022471294419065744,   0.016477852528429848,
                                      0.018629862441222258, -0.0028569998079524198, 0.031958087855986307};
inline constexpr double kPi = 3.141592653589793;
inline constexpr double kHalfPi = 1.5707963267948966;
// π/2 in three parts; the first two have 33 bits, so their products with k < 2^20 are exact.
inline constexpr double kHalfPiHigh = 1.57079632673412561417e+00;
inline constexpr double kHalfPiMiddle = 6.07710050630396597660e-11;
inline constexpr double kHalfPiLow = 2.02226624879595063154e-21;
// Above this the reduction below loses bits and scalar functions take over (infinity too).
inline constexpr double kReducible = 1.0e6;

enum class Trig : int { kSin, kCos, kTan };

template <class D>
UNTORCH_VECMATH_INLINE void sin_cos_reduced(D x, D& sine, D& cosine, Long<D>& quadrant) {
  const D shifted = x * 0.63661977236758134 + kRoundMagic;
  const D k = shifted - kRoundMagic;
  const D r = ((x - k * kHalfPiHigh) - k * kHalfPiMiddle) - k * kHalfPiLow;
  const D square = r * r;
  sine = r * square * polynomial(square, kSinMid) + r;
  cosine = square * (square * polynomial(square, kCosMid) - 0.5) + 1.0;
  quadrant = (Long<D>)shifted;  // its low two bits
}

template <Trig kWhich>
[[gnu::noinline]] double trig_large(double x) {
  return kWhich == Trig::kSin ? __builtin_sin(x) : kWhich == Trig::kCos ? __builtin_cos(x) : __builtin_tan(x);
}

template <Trig kWhich, class D>
UNTORCH_VECMATH_INLINE D trig_mid(D x) {
  D sine, cosine;
  Long<D> quadrant;
  sin_cos_reduced(x, sine, cosine, quadrant);
  const Long<D> odd = (quadrant & 1) != 0;
  D result;
  if constexpr (kWhich == Trig::kTan) {
    const Long<D> sign = odd & kSignBit;
    result = (odd ? cosine : sine) / (odd ? sine : cosine);
    result = (D)((Long<D>)result ^ sign);
  } else if constexpr (kWhich == Trig::kSin) {
    result = (D)((Long<D>)(odd ? cosine : sine) ^ ((quadrant & 2) << 62));
  } else {
    result = (D)((Long<D>)(odd ? sine : cosine) ^ (((quadrant + 1) & 2) << 62));
  }
  if constexpr (kWhich != Trig::kCos) result = x == 0.0 ? x : result;
  const Long<D> large = magnitude_of(x) > kReducible;
  if (__builtin_expect(any(large), 0)) {
    for (unsigned i = 0; i < sizeof(D) / sizeof(double); ++i) {
      if (large[i]) result[i] = trig_large<kWhich>(x[i]);
    }
  }
  return result;
}

// atan on [0, 1].
template <class D>
UNTORCH_VECMATH_INLINE D atan_reduced(D t) {
  const D square = t * t;
  return t * (square * polynomial(square, kAtanMid)) + t;
}
template <class D>
UNTORCH_VECMATH_INLINE D atan_mid(D x) {
  const D a = magnitude_of(x);
  const Long<D> big = a > 1.0;
  const D r = atan_reduced<D>(big ? 1.0 / a : a);
  return with_sign<D>(big ? kHalfPi - r : r, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D atan2_mid(D y, D x) {
  const D a = magnitude_of(y), b = magnitude_of(x);
  const Long<D> steep = a > b;
  D ratio = (steep ? b : a) / (steep ? a : b);
  ratio = a == b ? splat<D>(1.0) : ratio;    // inf/inf too
  ratio = a == 0.0 ? splat<D>(0.0) : ratio;  // 0/0 is along the x axis
  D r = atan_reduced(ratio);
  r = steep ? kHalfPi - r : r;
  r = sign_of(x) != 0 ? kPi - r : r;
  r = with_sign(r, sign_of(y));
  return (x != x) | (y != y) ? not_a_number<D>() : r;
}

// asin on [0, 1/2].
template <class D>
UNTORCH_VECMATH_INLINE D asin_reduced(D t) {
  const D square = t * t;
  return t * (square * polynomial(square, kAsinMid)) + t;
}
template <class D>
UNTORCH_VECMATH_INLINE D asin_mid(D x) {
  const D a = magnitude_of(x);
  const Long<D> big = a > 0.5;
  const D r = asin_reduced<D>(big ? square_root(0.5 - 0.5 * a) : a);
  return with_sign<D>(big ? kHalfPi - 2.0 * r : r, sign_of(x));
}
template <class D>
UNTORCH_VECMATH_INLINE D acos_mid(D x) {
  const D a = magnitude_of(x);
  const Long<D> big = a > 0.5;
  const D r = asin_reduced<D>(big ? square_root(0.5 - 0.5 * a) : a);
  const D far = x < 0.0 ? kPi - 2.0 * r : 2.0 * r;
  return big ? far : kHalfPi - (x < 0.0 ? -r : r);
}

}  // namespace
}  // namespace untorch::kernels::vecmath
