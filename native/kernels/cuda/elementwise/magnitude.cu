// Elementwise abs, angle and their inverse, polar: grid-stride loop, one element a thread (elementwise.cuh).
// Roofline: bound by memory. Bytes: the operands read once, the result written once; one operation an element, some
// tens for complex angles and polar.
#include "kernels/cuda/elementwise/elementwise.cuh"

namespace untorch::kernels::cuda {
namespace {

struct Absolute {
  template <class C>
  __device__ __forceinline__ auto operator()(C x) const {
    if constexpr (is_complex_type<C>)
      return hypot(x.re, x.im);
    else if constexpr (std::is_floating_point_v<C>)
      return fabs(x);
    else if constexpr (std::is_unsigned_v<C>)
      return x;
    // The lowest value has no positive twin and stays.
    else
      return x < 0 ? static_cast<C>(std::make_unsigned_t<C>(0) - static_cast<std::make_unsigned_t<C>>(x)) : x;
  }
};

struct Angle {
  template <class C>
  __device__ __forceinline__ auto operator()(C x) const {
    if constexpr (is_complex_type<C>) {
      return atan2(x.im, x.re);
    } else if constexpr (std::is_floating_point_v<C>) {
      return x != x ? x : x < 0 ? static_cast<C>(3.14159265358979323846) : C(0);
    } else if constexpr (std::is_unsigned_v<C>) {
      return 0.0f;
    } else {
      return x < 0 ? 3.14159265358979323846f : 0.0f;
    }
  }
};

struct Polar {
  template <class C>
  __device__ __forceinline__ Complex<C> operator()(C radius, C angle) const {
    C s, c;
    if constexpr (sizeof(C) == 8)
      sincos(angle, &s, &c);
    else
      sincosf(angle, &s, &c);
    return {radius * c, radius * s};
  }
};

}  // namespace

int absolute(const Unary& p, Stream stream) {
  return dispatch_number(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>)
      return launch_unary<typename T::Part, T>(p, Absolute{}, stream);
    else if constexpr (std::is_same_v<T, bool>)
      return kNoKernel;
    else
      return launch_unary<T, T>(p, Absolute{}, stream);
  });
}

int angle(const Unary& p, Stream stream) {
  return dispatch_number(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>)
      return launch_unary<typename T::Part, T>(p, Angle{}, stream);
    else if constexpr (is_float_type<T>)
      return launch_unary<T, T>(p, Angle{}, stream);
    else
      return launch_unary<float, T>(p, Angle{}, stream);
  });
}

int polar(const Binary& p, Stream stream) {
  if (p.dtype == DType::kFloat32) return launch_binary<Complex<float>, float>(p, Polar{}, stream);
  if (p.dtype == DType::kFloat64) return launch_binary<Complex<double>, double>(p, Polar{}, stream);
  return kNoKernel;
}

}  // namespace untorch::kernels::cuda
