// Complex values in device code, laid out as PyTorch's, and the dispatch over real and complex dtypes.
#pragma once

#include "kernels/cuda/common/device_types.cuh"

namespace untorch::kernels::cuda {

template <class T>
struct alignas(2 * sizeof(T)) Complex {
  using Part = T;
  T re, im;
};
template <class T>
inline constexpr bool is_complex_type = false;
template <class T>
inline constexpr bool is_complex_type<Complex<T>> = true;

template <class T>
__device__ __forceinline__ Complex<T> operator+(Complex<T> a, Complex<T> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class T>
__device__ __forceinline__ Complex<T> operator*(Complex<T> a, Complex<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// A value in the type that arithmetic is done in, and back.
template <class T>
__device__ __forceinline__ auto load_wide(const T* p) {
  if constexpr (is_complex_type<T>)
    return *p;
  else
    return widen(*p);
}
template <class T, class C>
__device__ __forceinline__ void store_narrow(T* p, C value) {
  if constexpr (is_complex_type<T>)
    *p = value;
  else
    *p = narrow<T>(value);
}

// dispatch_real and the complex types.
template <class Body>
int dispatch_number(DType dtype, Body&& body) {
  if (dtype == DType::kComplex64) return body(Type<Complex<float>>{});
  if (dtype == DType::kComplex128) return body(Type<Complex<double>>{});
  return dispatch_real(dtype, body);
}

}  // namespace untorch::kernels::cuda
