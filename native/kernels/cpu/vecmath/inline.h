// Float exp, log, tanh, sigmoid, SiLU and GELU on GCC vectors of 4, 8 or 16 lanes, for use inside *.isa.cpp kernels.
//
//   typedef float Float16 __attribute__((vector_size(64)));
//   Float16 y = untorch::kernels::vecmath::vexp(x);
//
// Everything has internal linkage, so each instruction-set level gets its own copy. FMA is used where the file's flags
// have it (-ffp-contract=fast); the algorithms do not need it. Branch-free; special values as in C's libm.
// Largest errors seen, ulp: vexp 0.8, vlog 0.95, vtanh 2.1, vsigmoid 2.4.
// vgelu and vgelu_tanh: 3e-7·|x|, as PyTorch's.
// Polynomials: scripts/fit_vecmath.py.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace untorch::kernels::vecmath {
namespace {

#define UNTORCH_VECMATH_INLINE [[gnu::always_inline]] inline

// The int32 vector that goes with a float vector (and is the type of its comparisons).
template <class F>
struct IntOf;
template <>
struct IntOf<float __attribute__((vector_size(16)))> {
  typedef std::int32_t type __attribute__((vector_size(16)));
};
template <>
struct IntOf<float __attribute__((vector_size(32)))> {
  typedef std::int32_t type __attribute__((vector_size(32)));
};
template <>
struct IntOf<float __attribute__((vector_size(64)))> {
  typedef std::int32_t type __attribute__((vector_size(64)));
};

template <class F>
UNTORCH_VECMATH_INLINE F vabs(F x) {
  using I = typename IntOf<F>::type;
  return (F)((I)x & 0x7fffffff);
}

// The larger, the smaller of x and a limit; NaN stays. One instruction on x86, which gives its second operand where
// either is NaN; compilers make a comparison and a blend of the general form.
template <class F>
UNTORCH_VECMATH_INLINE F at_least(F x, F limit) {
#if defined(__x86_64__)
  if constexpr (sizeof(F) == 16) return (F)_mm_max_ps((__m128)limit, (__m128)x);
#if defined(__AVX__)
  if constexpr (sizeof(F) == 32) return (F)_mm256_max_ps((__m256)limit, (__m256)x);
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(F) == 64) return (F)_mm512_maskz_max_ps(0xffff, (__m512)limit, (__m512)x);
#endif
#endif
  return limit > x ? limit : x;
}
template <class F>
UNTORCH_VECMATH_INLINE F at_most(F x, F limit) {
#if defined(__x86_64__)
  if constexpr (sizeof(F) == 16) return (F)_mm_min_ps((__m128)limit, (__m128)x);
#if defined(__AVX__)
  if constexpr (sizeof(F) == 32) return (F)_mm256_min_ps((__m256)limit, (__m256)x);
#endif
#if defined(__AVX512F__)
  if constexpr (sizeof(F) == 64) return (F)_mm512_maskz_min_ps(0xffff, (__m512)limit, (__m512)x);
#endif
#endif
  return limit < x ? limit : x;
}
template <class F>
UNTORCH_VECMATH_INLINE F between(F x, float low, float high) {
  return at_most(at_least(x, F{} + low), F{} + high);
}

// Horner's rule, lowest coefficient first.
template <class F, class T, int N>
UNTORCH_VECMATH_INLINE F polynomial(F x, const T (&coefficients)[N]) {
  F result = x * coefficients[N - 1] + coefficients[N - 2];
#pragma GCC unroll 32
  for (int i = N - 3; i >= 0; --i) result = result * x + coefficients[i];
  return result;
}

// exp for any x: 2^k·e^r with |r| <= log(2)/2; the power of two is applied in two steps so that subnormal results and
// those next to the overflow come out right.
template <class F>
UNTORCH_VECMATH_INLINE F vexp(F x) {
  using I = typename IntOf<F>::type;
  constexpr float kMagic = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer
  constexpr float kCoefficients[] = {0.49999994f, 0.166665211f, 0.041668389f, 0.00836871006f, 0.00138146023f};
  x = between(x, -110.0f, 90.0f);
  const F shifted = x * 1.44269502f + kMagic;
  const F k = shifted - kMagic;
  // log(2) = 0.693145752 (15 bits, so that the product is exact) + the rest.
  const F r = (x - k * 0.693145752f) - k * 1.42860677e-6f;
  // 1 + r by Fast2Sum, so that only the last addition rounds at full size.
  const F sum = r + 1.0f;
  const F lost = r - (sum - 1.0f);
  const F y = sum + (r * r * polynomial(r, kCoefficients) + lost);
  const I exponent = (I)shifted - (I)(F{} + kMagic);
  const I half = exponent >> 1;
  const F scale1 = (F)((half + 127) << 23);
  const F scale2 = (F)((exponent - half + 127) << 23);
  return y * scale1 * scale2;
}

// log for any x: e·log(2) + log(1 + f), 1 + f in [2/3, 4/3).
template <class F>
UNTORCH_VECMATH_INLINE F vlog(F x) {
  using I = typename IntOf<F>::type;
  constexpr float kCoefficients[] = {0.333333373f,  -0.249998197f, 0.199993059f,  -0.166796148f, 0.14312835f,
                                     -0.121952936f, 0.106613979f,  -0.128470823f, 0.123579033f};
  const I small = x < 1.17549435e-38f;
  const F scaled = small ? x * 8388608.0f : x;
  const I e = ((I)scaled - 0x3f2aaaab) >> 23;
  const F f = (F)((I)scaled - (e << 23)) - 1.0f;
  const F k = __builtin_convertvector(e + (small & -23), F);
  const F square = f * f;
  // k·log(2)'s high part and f are added exactly (Fast2Sum); all else is small.
  const F high = k * 0.693145752f;
  const F sum = high + f;
  const F lost = f - (sum - high);
  const F rest = square * (f * polynomial(f, kCoefficients) - 0.5f) + k * 1.42860677e-6f;
  F result = sum + (rest + lost);
  const F infinity = F{} + __builtin_inff();
  result = x == infinity ? x : result;
  result = x == 0.0f ? -infinity : result;
  return x >= 0.0f ? result : F{} + __builtin_nanf("");
}

// e^x = mantissa · 2^k for −87 <= x <= 88, to 2 ulp; k stands where a float has its exponent.
template <class F>
struct Exponential {
  F mantissa;
  typename IntOf<F>::type exponent;
};
template <class F>
UNTORCH_VECMATH_INLINE Exponential<F> split_exp(F x) {
  using I = typename IntOf<F>::type;
  constexpr float kMagic = 12582912.0f;  // 1.5·2^23: adding it rounds to an integer
  constexpr float kCoefficients[] = {1.0f,         1.0f,           0.49999994f,   0.166665211f,
                                     0.041668389f, 0.00836871006f, 0.00138146023f};
  const F shifted = x * 1.44269502f + kMagic;
  const F r = x - (shifted - kMagic) * 0.693147182f;
  // The low bits of shifted are the integer; what else it holds is shifted out.
  return {polynomial(r, kCoefficients), (I)shifted << 23};
}

// e^x for −87 <= x <= 88: no range to guard, no result to scale. NaN may become anything.
template <class F>
UNTORCH_VECMATH_INLINE F vexp_within(F x) {
  using I = typename IntOf<F>::type;
  const Exponential<F> e = split_exp(x);
  return (F)((I)e.mantissa + e.exponent);
}

// tanh: an odd polynomial below 1.25, 1 − 2/(e^2x + 1) above.
template <class F>
UNTORCH_VECMATH_INLINE F vtanh(F x) {
  using I = typename IntOf<F>::type;
  constexpr float kCoefficients[] = {-0.333333224f,  0.133330688f,     -0.0539439581f,  0.021758426f,   -0.00856889691f,
                                     0.00310219079f, -0.000918058446f, 0.000185129655f, -1.81292125e-5f};
  const F magnitude = vabs(x);
  const F square = x * x;
  const F small = x * (square * polynomial(square, kCoefficients)) + x;
  const F large = 1.0f - 2.0f / (vexp_within(at_most(magnitude + magnitude, F{} + 40.0f)) + 1.0f);
  const I sign = (I)x & INT32_MIN;
  return (F)((I)(magnitude >= 1.25f ? large : small) | sign);  // the sign of −0 too; NaN from the polynomial
}

// 1 / (1 + e^−x); below −88.7 it is 0, as in PyTorch.
template <class F>
UNTORCH_VECMATH_INLINE F vsigmoid(F x) {
  return 1.0f / (1.0f + vexp(-x));
}

// x / (1 + e^−x). Below −87 the result is x·e^−87, almost 0.
template <class F>
UNTORCH_VECMATH_INLINE F vsilu(F x) {
  return x / (1.0f + vexp_within(-between(x, -87.0f, 87.0f)));
}

// x·Φ(x), the normal distribution's: Φ(x) − 1/2 is x times a rational function of x². From √31 on it is ±1/2. One
// division, where erf takes two polynomials and an exponential.
template <class F>
UNTORCH_VECMATH_INLINE F vgelu(F x) {
  using I = typename IntOf<F>::type;
  constexpr float kAbove[] = {0.398942262f,    0.0337681174f,  0.00466826465f,
                              0.000167412756f, 6.29114493e-6f, 2.24971028e-8f};
  constexpr float kBelow[] = {1.0f, 0.251310468f, 0.0285874885f, 0.00187683164f, 7.29206731e-5f, 1.18559694e-6f};
  const F square = x * x;
  const F inside = x * polynomial(square, kAbove) / polynomial(square, kBelow);
  const F end = (F)(((I)x & INT32_MIN) | (I)(F{} + 0.5f));
  return x * (0.5f + (square >= 31.0f ? end : inside));  // false for NaN, which stays
}

// x / (1 + e^−2u) with u = √(2/π)·(x + 0.044715·x³): GELU with tanh, which is 1 − 2/(e^2u + 1).
template <class F>
UNTORCH_VECMATH_INLINE F vgelu_tanh(F x) {
  const F twice = x * (1.59576912f + 0.0713548163f * (x * x));
  return x / (1.0f + vexp_within(-between(twice, -87.0f, 87.0f)));
}

}  // namespace
}  // namespace untorch::kernels::vecmath
