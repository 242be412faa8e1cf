// Elementwise pow and gcd: grid-stride loop, one element a thread (elementwise.cuh).
// Roofline: bound by arithmetic. A float power is about 100 instructions, a double one several times more; integers
// take one step for each bit. Bytes: both operands read once, the result written once.
#include "kernels/cuda/elementwise/elementwise.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class T>
__device__ __forceinline__ T integer_power(T base, T exponent) {
  if constexpr (std::is_signed_v<T>) {
    if (exponent < 0) return base == 1 ? T(1) : base == -1 ? (exponent % 2 == 0 ? T(1) : T(-1)) : T(0);
  }
  using U = std::make_unsigned_t<T>;
  std::uint64_t result = 1, factor = static_cast<U>(base), rest = static_cast<U>(exponent);
  for (; rest != 0; rest >>= 1) {
    if ((rest & 1) != 0) result *= factor;
    factor *= factor;
  }
  return static_cast<T>(result);
}

struct Power {
  template <class C>
  __device__ __forceinline__ C operator()(C x, C y) const {
    if constexpr (is_complex_type<C>) {
      if (y.re == 0 && y.im == 0) return {1, 0};
      if (x.re == 0 && x.im == 0) {
        // 0 to a power with a positive real part; the rest has no value.
        return y.re > 0 ? C{0, 0} : C{static_cast<typename C::Part>(NAN), static_cast<typename C::Part>(NAN)};
      }
      // exp(y · log x), in double: the angle loses as many digits as the exponent has.
      const double radius = log(hypot(static_cast<double>(x.re), static_cast<double>(x.im)));
      const double turn = atan2(static_cast<double>(x.im), static_cast<double>(x.re));
      const double magnitude = exp(y.re * radius - y.im * turn), angle = y.im * radius + y.re * turn;
      double s, c;
      sincos(angle, &s, &c);
      return {static_cast<typename C::Part>(magnitude * c), static_cast<typename C::Part>(magnitude * s)};
    } else if constexpr (std::is_integral_v<C>) {
      return integer_power(x, y);
    } else {
      return pow(x, y);
    }
  }
};

struct Gcd {
  template <class T>
  __device__ __forceinline__ T operator()(T x, T y) const {
    using U = std::make_unsigned_t<T>;
    U a = static_cast<U>(x), b = static_cast<U>(y);
    if constexpr (std::is_signed_v<T>) {
      if (x < 0) a = static_cast<U>(U(0) - a);
      if (y < 0) b = static_cast<U>(U(0) - b);
    }
    while (b != 0) {
      const U rest = static_cast<U>(a % b);
      a = b;
      b = rest;
    }
    return static_cast<T>(a);
  }
};

}  // namespace

int power(const Binary& p, Stream stream) {
  const DType dtype = p.dtype;
  if (dtype == DType::kBool) return kNoKernel;
  const auto body = [&](auto type) -> int {
    using T = typename decltype(type)::type;
    return launch_binary<T, T>(p, Power{}, stream);
  };
  if (dtype == DType::kComplex64) return body(Type<Complex<float>>{});
  if (dtype == DType::kComplex128) return body(Type<Complex<double>>{});
  const int code = dispatch_floating(dtype, body);
  return code == kNoKernel ? dispatch_integral(dtype, body) : code;
}

int gcd(const Binary& p, Stream stream) {
  return dispatch_integral(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    return launch_binary<T, T>(p, Gcd{}, stream);
  });
}

}  // namespace untorch::kernels::cuda
