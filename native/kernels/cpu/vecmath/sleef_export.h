// Defines the SLEEF-named functions of one vector width and their table. Included once by sleef128/256/512.cpp, which
// set before: UNTORCH_SLEEF_F(name, accuracy) and UNTORCH_SLEEF_D(name, accuracy), the exported names;
// UNTORCH_SLEEF_TABLE, the table's; and UNTORCH_SLEEF_DOUBLE, the double vector type of the width.
#include "kernels/cpu/vecmath/double_scalar.h"
#include "kernels/cpu/vecmath/double_trig.h"
#include "kernels/cpu/vecmath/float_other.h"
#include "kernels/cpu/vecmath/float_trig.h"
#include "kernels/cpu/vecmath/sleef_table.h"

// Name and accuracy suffix as at::vec spells them, and the two implementations (on a register of floats and of
// doubles).
#define UNTORCH_SLEEF_UNARY(X)                                                                                \
  X(acos, _u10, WIDE(acos_mid), acos_double(x))                                                               \
  X(acosh, _u10, WIDE(acosh_mid), acosh_double(x))                                                            \
  X(asin, _u10, WIDE(asin_mid), asin_double(x))                                                               \
  X(asinh, _u10, WIDE(asinh_mid), asinh_double(x))                                                            \
  X(atan, _u10, WIDE(atan_mid), atan_double(x))                                                               \
  X(atanh, _u10, WIDE(atanh_mid), atanh_double(x))                                                            \
  X(cos, _u10, WIDE(trig_mid<Trig::kCos>), cos_double(x))                                                     \
  X(cos, _u35, WIDE(trig_mid<Trig::kCos>), cos_double(x))                                                     \
  X(cosh, _u10, WIDE(cosh_mid), cosh_double(x))                                                               \
  X(erf, _u10, WIDE(erf_mid), erf_double(x))                                                                  \
  X(erfc, _u15, WIDE(erfc_mid), erfc_double(x))                                                               \
  X(exp, _u10, vexp(x), exp_double(x))                                                                        \
  X(exp2, _u10, WIDE(exp2_mid), exp2_double(x))                                                               \
  X(expm1, _u10, WIDE(expm1_mid), expm1_double(x))                                                            \
  X(lgamma, _u10, by_lane(x, [](float v) { return static_cast<float>(lgamma_scalar(v)); }), lgamma_double(x)) \
  X(log, _u10, vlog(x), log_double(x))                                                                        \
  X(log10, _u10, WIDE(log10_mid), log10_double(x))                                                            \
  X(log1p, _u10, WIDE(log1p_mid), log1p_double(x))                                                            \
  X(log2, _u10, WIDE(log2_mid), log2_double(x))                                                               \
  X(sin, _u10, WIDE(trig_mid<Trig::kSin>), sin_double(x))                                                     \
  X(sin, _u35, WIDE(trig_mid<Trig::kSin>), sin_double(x))                                                     \
  X(sinh, _u10, WIDE(sinh_mid), sinh_double(x))                                                               \
  X(tan, _u10, WIDE(trig_mid<Trig::kTan>), tan_double(x))                                                     \
  X(tanh, _u10, WIDE(tanh_mid), tanh_double(x))
#define UNTORCH_SLEEF_BINARY(X)                                                                         \
  X(atan2, _u10, WIDE2(atan2_mid), atan2_double(x, y))                                                  \
  X(copysign, , (F)(((IF)x & INT32_MAX) | ((IF)y & INT32_MIN)), with_sign(magnitude_of(x), sign_of(y))) \
  X(fmod, , WIDE2(fmod_mid), fmod_double(x, y))                                                         \
  X(hypot, _u05, WIDE2(hypot_mid), hypot_double(x, y))                                                  \
  X(nextafter, , (nextafter_bits<F, IF>(x, y, INT32_MIN)), (nextafter_bits<D, ID>(x, y, kSignBit)))     \
  X(pow, _u10, WIDE2(pow_mid), pow_double(x, y))

#define WIDE(function) in_double<D>(x, [](D v) __attribute__((always_inline)) { return function(v); })
#define WIDE2(function) in_double<D>(x, y, [](D v, D w) __attribute__((always_inline)) { return function(v, w); })

namespace untorch::kernels::vecmath {
template <class V>
struct Two {  // the layout of SLEEF's pairs
  V x, y;
};

namespace {
using D = UNTORCH_SLEEF_DOUBLE;
using ID = Long<D>;
using F = Pair<D>;
using IF = IntOf<F>::type;

// V's element type.
template <class V>
using Element = __typeof__(V{}[0] + V{}[0]);
}  // namespace
}  // namespace untorch::kernels::vecmath

// C linkage, C++ inside: the names are at::vec's, the vector types are the ABI's own.
#define UNTORCH_SLEEF_EXPORT extern "C" __attribute__((visibility("default")))
#define UNTORCH_DEFINE_UNARY(name, accuracy, single_form, double_form)                                                \
  UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::F UNTORCH_SLEEF_F(name, accuracy)(untorch::kernels::vecmath::F x) { \
    using namespace untorch::kernels::vecmath;                                                                        \
    return single_form;                                                                                               \
  }                                                                                                                   \
  UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::D UNTORCH_SLEEF_D(name, accuracy)(untorch::kernels::vecmath::D x) { \
    using namespace untorch::kernels::vecmath;                                                                        \
    return double_form;                                                                                               \
  }
#define UNTORCH_DEFINE_BINARY(name, accuracy, single_form, double_form)                                               \
  UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::F UNTORCH_SLEEF_F(name, accuracy)(untorch::kernels::vecmath::F x,   \
                                                                                    untorch::kernels::vecmath::F y) { \
    using namespace untorch::kernels::vecmath;                                                                        \
    return single_form;                                                                                               \
  }                                                                                                                   \
  UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::D UNTORCH_SLEEF_D(name, accuracy)(untorch::kernels::vecmath::D x,   \
                                                                                    untorch::kernels::vecmath::D y) { \
    using namespace untorch::kernels::vecmath;                                                                        \
    return double_form;                                                                                               \
  }
UNTORCH_SLEEF_UNARY(UNTORCH_DEFINE_UNARY)
UNTORCH_SLEEF_BINARY(UNTORCH_DEFINE_BINARY)

UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::Two<untorch::kernels::vecmath::F> UNTORCH_SLEEF_F(sincos, _u10)(
    untorch::kernels::vecmath::F x) {
  return {UNTORCH_SLEEF_F(sin, _u10)(x), UNTORCH_SLEEF_F(cos, _u10)(x)};
}
UNTORCH_SLEEF_EXPORT untorch::kernels::vecmath::Two<untorch::kernels::vecmath::D> UNTORCH_SLEEF_D(sincos, _u10)(
    untorch::kernels::vecmath::D x) {
  return {UNTORCH_SLEEF_D(sin, _u10)(x), UNTORCH_SLEEF_D(cos, _u10)(x)};
}

namespace untorch::kernels::vecmath {
namespace {

// `lanes` elements from `start` on; the rest of the vector is zero. The whole vector is the common case.
template <class V>
UNTORCH_VECMATH_INLINE V load(const void* data, std::int64_t start, std::int64_t lanes) {
  V result{};
  const unsigned long bytes = static_cast<unsigned long>(lanes) * sizeof(Element<V>);
  if (bytes == sizeof(V)) {
    __builtin_memcpy(&result, static_cast<const Element<V>*>(data) + start, sizeof(V));
  } else {
    __builtin_memcpy(&result, static_cast<const Element<V>*>(data) + start, bytes);
  }
  return result;
}
template <class V>
UNTORCH_VECMATH_INLINE void store(void* data, std::int64_t start, std::int64_t lanes, V value) {
  const unsigned long bytes = static_cast<unsigned long>(lanes) * sizeof(Element<V>);
  if (bytes == sizeof(V)) {
    __builtin_memcpy(static_cast<Element<V>*>(data) + start, &value, sizeof(V));
  } else {
    __builtin_memcpy(static_cast<Element<V>*>(data) + start, &value, bytes);
  }
}

template <class V, V (*kFunction)(V)>
void apply_unary(const void* a, const void*, void* out, std::int64_t n) {
  constexpr std::int64_t kLanes = sizeof(V) / sizeof(Element<V>);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t lanes = n - i < kLanes ? n - i : kLanes;
    store<V>(out, i, lanes, kFunction(load<V>(a, i, lanes)));
  }
}
template <class V, V (*kFunction)(V, V)>
void apply_binary(const void* a, const void* b, void* out, std::int64_t n) {
  constexpr std::int64_t kLanes = sizeof(V) / sizeof(Element<V>);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t lanes = n - i < kLanes ? n - i : kLanes;
    store<V>(out, i, lanes, kFunction(load<V>(a, i, lanes), load<V>(b, i, lanes)));
  }
}
template <class V, Two<V> (*kFunction)(V)>
void apply_pair(const void* a, const void*, void* out, std::int64_t n) {
  constexpr std::int64_t kLanes = sizeof(V) / sizeof(Element<V>);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t lanes = n - i < kLanes ? n - i : kLanes;
    const Two<V> result = kFunction(load<V>(a, i, lanes));
    store<V>(out, i, lanes, result.x);
    store<V>(out, n + i, lanes, result.y);
  }
}

}  // namespace

// inline.h's functions at this width, for the tests alone.
#define UNTORCH_INLINE_FUNCTIONS(X) X(vexp) X(vlog) X(vtanh) X(vsigmoid) X(vgelu) X(vgelu_tanh)
#define UNTORCH_DEFINE_INLINE(name) \
  F name##_out_of_line(F x) { return name(x); }
namespace {
UNTORCH_INLINE_FUNCTIONS(UNTORCH_DEFINE_INLINE)
}

#define UNTORCH_STRING(text) #text
#define UNTORCH_NAME(text) UNTORCH_STRING(text)
#define UNTORCH_UNARY_ENTRY(name, accuracy, single_form, double_form)                               \
  {UNTORCH_NAME(UNTORCH_SLEEF_F(name, accuracy)), apply_unary<F, UNTORCH_SLEEF_F(name, accuracy)>}, \
      {UNTORCH_NAME(UNTORCH_SLEEF_D(name, accuracy)), apply_unary<D, UNTORCH_SLEEF_D(name, accuracy)>},
#define UNTORCH_BINARY_ENTRY(name, accuracy, single_form, double_form)                               \
  {UNTORCH_NAME(UNTORCH_SLEEF_F(name, accuracy)), apply_binary<F, UNTORCH_SLEEF_F(name, accuracy)>}, \
      {UNTORCH_NAME(UNTORCH_SLEEF_D(name, accuracy)), apply_binary<D, UNTORCH_SLEEF_D(name, accuracy)>},

#define UNTORCH_INLINE_ENTRY(name) {UNTORCH_NAME(UNTORCH_SLEEF_F(name, )), apply_unary<F, name##_out_of_line>},

const NamedFunction UNTORCH_SLEEF_TABLE[] = {
    UNTORCH_INLINE_FUNCTIONS(UNTORCH_INLINE_ENTRY) UNTORCH_SLEEF_UNARY(UNTORCH_UNARY_ENTRY)
        UNTORCH_SLEEF_BINARY(UNTORCH_BINARY_ENTRY){UNTORCH_NAME(UNTORCH_SLEEF_F(sincos, _u10)),
                                                   apply_pair<F, UNTORCH_SLEEF_F(sincos, _u10)>},
    {UNTORCH_NAME(UNTORCH_SLEEF_D(sincos, _u10)), apply_pair<D, UNTORCH_SLEEF_D(sincos, _u10)>},
    {nullptr, nullptr}};

}  // namespace untorch::kernels::vecmath
