// Double functions lane by lane through C's libm: those that have no vector form here yet.
//
// glibc's double pow, tan, asin … stay within 1 ulp and are used as they are; the others (inverse hyperbolic,
// gamma, error functions, hypot) are computed in long double and rounded once.
#pragma once

#include <math.h>

#include "kernels/cpu/vecmath/vector.h"

namespace untorch::kernels::vecmath {
namespace {

#define UNTORCH_BY_LANE(name, expression)                                                             \
  [[gnu::noinline]] inline double name##_scalar(double x) { return static_cast<double>(expression); } \
  template <class D>                                                                                  \
  UNTORCH_VECMATH_INLINE D name##_double(D x) {                                                       \
    return by_lane(x, [](double lane) { return name##_scalar(lane); });                               \
  }
#define UNTORCH_BY_LANE2(name, expression)                                                                      \
  [[gnu::noinline]] inline double name##_scalar(double x, double y) { return static_cast<double>(expression); } \
  template <class D>                                                                                            \
  UNTORCH_VECMATH_INLINE D name##_double(D x, D y) {                                                            \
    return by_lane(x, y, [](double a, double b) { return name##_scalar(a, b); });                               \
  }

UNTORCH_BY_LANE(tan, __builtin_tan(x))
UNTORCH_BY_LANE(asin, __builtin_asin(x))
UNTORCH_BY_LANE(acos, __builtin_acos(x))
UNTORCH_BY_LANE(atan, __builtin_atan(x))
UNTORCH_BY_LANE(asinh, __builtin_asinhl(x))
UNTORCH_BY_LANE(acosh, __builtin_acoshl(x))
UNTORCH_BY_LANE(atanh, __builtin_atanhl(x))
UNTORCH_BY_LANE(erf, __builtin_erfl(x))
UNTORCH_BY_LANE(erfc, __builtin_erfcl(x))
UNTORCH_BY_LANE2(pow, __builtin_pow(x, y))
UNTORCH_BY_LANE2(atan2, __builtin_atan2(x, y))
UNTORCH_BY_LANE2(hypot, __builtin_hypotl(x, y))
UNTORCH_BY_LANE2(fmod, __builtin_fmod(x, y))

// The _r form keeps the sign of gamma out of the global.
[[gnu::noinline]] inline double lgammal_scalar(double x) {
  int sign = 0;
  return static_cast<double>(lgammal_r(x, &sign));
}
template <class D>
UNTORCH_VECMATH_INLINE D lgamma_double(D x) {
  return by_lane(x, [](double lane) { return lgammal_scalar(lane); });
}

#undef UNTORCH_BY_LANE
#undef UNTORCH_BY_LANE2

}  // namespace
}  // namespace untorch::kernels::vecmath
