// Elementwise add and multiply of strided operands: grid-stride loop, one element a thread (elementwise.cuh).
// Roofline: bound by memory. Bytes: both operands read once, the result written once; one or two operations an element.
#include "kernels/cuda/elementwise/elementwise.cuh"

namespace untorch::kernels::cuda {
namespace {

template <class C>
struct Add {
  C alpha;
  __device__ __forceinline__ C operator()(C x, C y) const {
    if constexpr (std::is_same_v<C, bool>)
      return x || (alpha && y);
    else
      return static_cast<C>(x + alpha * y);
  }
};

template <class P>
struct Add<Complex<P>> {
  P alpha;
  __device__ __forceinline__ Complex<P> operator()(Complex<P> x, Complex<P> y) const {
    return {x.re + alpha * y.re, x.im + alpha * y.im};
  }
};

template <class C>
struct Multiply {
  __device__ __forceinline__ C operator()(C x, C y) const {
    if constexpr (std::is_same_v<C, bool>)
      return x && y;
    else if constexpr (is_complex_type<C>)
      return x * y;
    else
      return static_cast<C>(x * y);
  }
};

int add(const Binary& p, Stream stream) {
  return dispatch_number(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>) {
      return launch_binary<T, T>(p, Add<T>{static_cast<typename T::Part>(p.alpha)}, stream);
    } else if constexpr (std::is_same_v<T, bool>) {
      return launch_binary<T, T>(p, Add<T>{p.alpha != 0}, stream);
    } else if constexpr (std::is_integral_v<T>) {
      // Through int64, so that -1 is what it is for unsigned types as well.
      return launch_binary<T, T>(p, Add<T>{static_cast<T>(static_cast<std::int64_t>(p.alpha))}, stream);
    } else {
      return launch_binary<T, T>(p, Add<Compute<T>>{static_cast<Compute<T>>(p.alpha)}, stream);
    }
  });
}

int multiply(const Binary& p, Stream stream) {
  return dispatch_number(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>)
      return launch_binary<T, T>(p, Multiply<T>{}, stream);
    else
      return launch_binary<T, T>(p, Multiply<Compute<T>>{}, stream);
  });
}

}  // namespace

int binary(const Binary& p, Stream stream) {
  switch (p.function) {
    case BinaryFunction::kAdd:
      return add(p, stream);
    case BinaryFunction::kMultiply:
      return multiply(p, stream);
    case BinaryFunction::kPower:
      return power(p, stream);
    case BinaryFunction::kGcd:
      return gcd(p, stream);
    case BinaryFunction::kPolar:
      return polar(p, stream);
  }
  return kNoKernel;
}

}  // namespace untorch::kernels::cuda
