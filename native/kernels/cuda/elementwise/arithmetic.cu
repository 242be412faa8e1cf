// Sums and products. Bytes: both operands read once, the result written once; one or two operations an element.
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

}  // namespace

int add(const Strided<3>& space, void* out, Operand a, Operand b, double alpha, DType dtype, Stream stream) {
  return dispatch_number(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>) {
      return launch_binary<T, T>(space, out, a, b, Add<T>{static_cast<typename T::Part>(alpha)}, stream);
    } else if constexpr (std::is_same_v<T, bool>) {
      return launch_binary<T, T>(space, out, a, b, Add<T>{alpha != 0}, stream);
    } else if constexpr (std::is_integral_v<T>) {
      // Through int64, so that -1 is what it is for unsigned types as well.
      return launch_binary<T, T>(space, out, a, b, Add<T>{static_cast<T>(static_cast<std::int64_t>(alpha))}, stream);
    } else {
      return launch_binary<T, T>(space, out, a, b, Add<Compute<T>>{static_cast<Compute<T>>(alpha)}, stream);
    }
  });
}

int multiply(const Strided<3>& space, void* out, Operand a, Operand b, DType dtype, Stream stream) {
  return dispatch_number(dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (is_complex_type<T>)
      return launch_binary<T, T>(space, out, a, b, Multiply<T>{}, stream);
    else
      return launch_binary<T, T>(space, out, a, b, Multiply<Compute<T>>{}, stream);
  });
}

}  // namespace untorch::kernels::cuda
