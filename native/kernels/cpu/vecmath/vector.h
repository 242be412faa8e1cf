// The double lanes that the SLEEF-named functions are written with: types, bit casts, selection, sqrt, truncation.
//
// D is a GCC vector of 2, 4 or 8 doubles, Long<D> the int64 vector beside it (also the type of D's comparisons),
// Single<D> the float vector of as many lanes. x86 only; internal linkage, so that code for one width never serves
// another.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/vecmath/inline.h"

namespace untorch::kernels::vecmath {
namespace {

typedef double Double2 __attribute__((vector_size(16)));
typedef double Double4 __attribute__((vector_size(32)));
typedef double Double8 __attribute__((vector_size(64)));

template <class D>
struct Lanes;
template <>
struct Lanes<Double2> {
  typedef std::int64_t Long __attribute__((vector_size(16)));
  typedef float Single __attribute__((vector_size(8)));
  typedef float Pair __attribute__((vector_size(16)));
};
template <>
struct Lanes<Double4> {
  typedef std::int64_t Long __attribute__((vector_size(32)));
  typedef float Single __attribute__((vector_size(16)));
  typedef float Pair __attribute__((vector_size(32)));
};
template <>
struct Lanes<Double8> {
  typedef std::int64_t Long __attribute__((vector_size(64)));
  typedef float Single __attribute__((vector_size(32)));
  typedef float Pair __attribute__((vector_size(64)));
};

template <class D>
using Long = typename Lanes<D>::Long;
template <class D>
using Single = typename Lanes<D>::Single;
// As many floats as fill a register of D's size: what the float functions take, half by half.
template <class D>
using Pair = typename Lanes<D>::Pair;

inline constexpr std::int64_t kSignBit = INT64_MIN;
inline constexpr double kRoundMagic = 6755399441055744.0;  // 1.5·2^52: adding it rounds to an integer
inline constexpr std::int64_t kRoundMagicBits = 0x4338000000000000;

template <class D>
UNTORCH_VECMATH_INLINE D splat(double value) {
  return D{} + value;
}
template <class D>
UNTORCH_VECMATH_INLINE D infinity() {
  return splat<D>(__builtin_inf());
}
template <class D>
UNTORCH_VECMATH_INLINE D not_a_number() {
  return splat<D>(__builtin_nan(""));
}
template <class D>
UNTORCH_VECMATH_INLINE Long<D> sign_of(D x) {
  return (Long<D>)x & kSignBit;
}
template <class D>
UNTORCH_VECMATH_INLINE D magnitude_of(D x) {
  return (D)((Long<D>)x & INT64_MAX);
}
template <class D>
UNTORCH_VECMATH_INLINE D with_sign(D magnitude, Long<D> sign) {
  return (D)((Long<D>)magnitude | sign);
}

UNTORCH_VECMATH_INLINE Double2 square_root(Double2 x) { return (Double2)_mm_sqrt_pd((__m128d)x); }
UNTORCH_VECMATH_INLINE Double2 truncate(Double2 x) { return (Double2)_mm_round_pd((__m128d)x, 3 | 8); }
UNTORCH_VECMATH_INLINE bool any(Lanes<Double2>::Long mask) { return _mm_movemask_pd((__m128d)mask) != 0; }
#if defined(__AVX2__)
UNTORCH_VECMATH_INLINE Double4 square_root(Double4 x) { return (Double4)_mm256_sqrt_pd((__m256d)x); }
UNTORCH_VECMATH_INLINE Double4 truncate(Double4 x) { return (Double4)_mm256_round_pd((__m256d)x, 3 | 8); }
UNTORCH_VECMATH_INLINE bool any(Lanes<Double4>::Long mask) { return _mm256_movemask_pd((__m256d)mask) != 0; }
#endif
#if defined(__AVX512DQ__)
UNTORCH_VECMATH_INLINE Double8 square_root(Double8 x) { return (Double8)_mm512_maskz_sqrt_pd(0xff, (__m512d)x); }
UNTORCH_VECMATH_INLINE Double8 truncate(Double8 x) {
  return (Double8)_mm512_maskz_roundscale_pd(0xff, (__m512d)x, 3 | 8);
}
UNTORCH_VECMATH_INLINE bool any(Lanes<Double8>::Long mask) { return _mm512_movepi64_mask((__m512i)mask) != 0; }
#endif

// k (integers that the magic number left in the low bits) → double; |k| < 2^51.
template <class D>
UNTORCH_VECMATH_INLINE D to_double(Long<D> k) {
  return (D)(k + kRoundMagicBits) - kRoundMagic;
}

template <class D>
struct Halves {
  Single<D> low, high;
};

// A float function from one on double lanes: both halves widened, computed, rounded.
template <class D, class Function>
UNTORCH_VECMATH_INLINE Pair<D> in_double(Pair<D> x, Function function) {
  const Halves<D> in = __builtin_bit_cast(Halves<D>, x);
  const Halves<D> out = {__builtin_convertvector(function(__builtin_convertvector(in.low, D)), Single<D>),
                         __builtin_convertvector(function(__builtin_convertvector(in.high, D)), Single<D>)};
  return __builtin_bit_cast(Pair<D>, out);
}
template <class D, class Function>
UNTORCH_VECMATH_INLINE Pair<D> in_double(Pair<D> x, Pair<D> y, Function function) {
  const Halves<D> a = __builtin_bit_cast(Halves<D>, x);
  const Halves<D> b = __builtin_bit_cast(Halves<D>, y);
  const Halves<D> out = {
      __builtin_convertvector(function(__builtin_convertvector(a.low, D), __builtin_convertvector(b.low, D)),
                              Single<D>),
      __builtin_convertvector(function(__builtin_convertvector(a.high, D), __builtin_convertvector(b.high, D)),
                              Single<D>)};
  return __builtin_bit_cast(Pair<D>, out);
}

// Lane by lane through a scalar function.
template <class V, class Function>
UNTORCH_VECMATH_INLINE V by_lane(V x, Function function) {
  V result;
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) result[i] = function(x[i]);
  return result;
}
template <class V, class Function>
UNTORCH_VECMATH_INLINE V by_lane(V x, V y, Function function) {
  V result;
  for (unsigned i = 0; i < sizeof(V) / sizeof(x[0]); ++i) result[i] = function(x[i], y[i]);
  return result;
}

}  // namespace
}  // namespace untorch::kernels::vecmath
