// What element-wise and lane-wise operators share: type promotion, broadcasting, output layout (new tensors are on
// their operand's device), and the CPU's loops.
#pragma once

#include <array>
#include <complex>
#include <vector>

#include "kernels/cpu/strided_loop.h"
#include "shims/shim.h"

namespace untorch::shims {

// The dtype that holds both, as torch.promote_types. Refuses pairs that PyTorch refuses (uint16 and up with others).
DType promote_types(DType a, DType b);
// torch.result_type of two tensors: a 0-D tensor only counts when its category (bool, integer, float, complex) is
// higher.
DType result_type(const Tensor& a, const Tensor& b);
// torch.result_type of a tensor and a Python float.
DType result_type_with_double(const Tensor& a);

std::vector<std::int64_t> broadcast_shapes(DimSpan a, DimSpan b, const char* op);
// Strides of `t` seen as `shape`: 0 where it is repeated. The shape must be one that t broadcasts to.
std::vector<std::int64_t> broadcast_strides(const Tensor& t, DimSpan shape, const char* op, const char* argument);
// `t` as a view of that shape.
Tensor expand(const Tensor& t, DimSpan shape, const char* op, const char* argument);

// No two elements share memory and there is no hole between them.
bool is_dense(DimSpan sizes, DimSpan strides);
// The strides that PyTorch gives the result of an element-wise operator with these operands (of the result's shape).
Dims elementwise_strides(DimSpan shape, const std::vector<std::vector<std::int64_t>>& operands);
// A new tensor laid out like `t`: its strides when it is dense, else the order of its dimensions.
TensorPtr empty_like(const Tensor& t, DType dtype);
// empty_like and copied.
TensorPtr clone_like(const Tensor& t);
// empty_like under an optional memory_format code (absent or preserve: like `t`).
TensorPtr empty_like_format(const Tensor& t, DType dtype, const std::int32_t* memory_format, const char* op);

// A factory's dtype, layout and device arguments, checked: strided and on the CPU.
void check_factory(const std::int32_t* layout, const std::int32_t* device, const char* op);

// Reduces the shape along `dim`: removed, or 1 with keepdim. 0-D stays 0-D.
std::vector<std::int64_t> reduced_shape(DimSpan shape, std::int64_t dim, bool keepdim);
// Shape or strides without entry `dim`; a 0-D list stays empty.
std::vector<std::int64_t> without(DimSpan values, std::int64_t dim);
// Size and stride along `dim`; 1 and 1 for a 0-D tensor.
std::int64_t lane_size(const Tensor& t, std::int64_t dim);
std::int64_t lane_stride(const Tensor& t, std::int64_t dim);

// body(offsets): the first element's offset of every lane along `dim`, in each tensor. The tensors agree in the other
// dimensions. Parallel over lanes; the body may throw. Fewer dimensions (reduced tensors) are not accepted.
template <std::size_t N, class Body>
void for_each_lane(const std::array<const Tensor*, N>& tensors, std::int64_t dim, DimSpan shape, std::int64_t cost,
                   Body&& body) {
  const std::vector<std::int64_t> sizes = without(shape, dim);
  std::array<std::vector<std::int64_t>, N> strides;
  std::array<std::span<const std::int64_t>, N> spans;
  for (std::size_t k = 0; k < N; ++k) {
    strides[k] = without(tensors[k]->strides(), dim);
    spans[k] = strides[k];
  }
  const kernels::StridedLoop<N> loop(sizes, spans);
  const auto inner = loop.inner();
  loop.run(
      [&](const std::array<std::int64_t, N>& start, std::int64_t n) {
        std::array<std::int64_t, N> at = start;
        for (std::int64_t i = 0; i < n; ++i) {
          body(static_cast<const std::array<std::int64_t, N>&>(at));
          for (std::size_t k = 0; k < N; ++k) at[k] += inner[k];
        }
      },
      std::max<std::int64_t>(cost, 1));
}

// out[i] = fn(a[i]); both of out's shape and of the C++ types given.
template <class Out, class In, class Fn>
void map_unary(const Tensor& out, const Tensor& a, Fn&& fn) {
  const auto sa = broadcast_strides(a, out.sizes(), "elementwise", "self");
  const kernels::StridedLoop<2> loop(out.sizes(), {DimSpan(out.strides()), DimSpan(sa)});
  const auto step = loop.inner();
  Out* to = out.data<Out>();
  const In* from = a.data<In>();
  loop.run([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) to[at[0] + i * step[0]] = fn(from[at[1] + i * step[1]]);
  });
}

// out[i] = fn(a[i], b[i]); a and b broadcast to out's shape.
template <class Out, class A, class B, class Fn>
void map_binary(const Tensor& out, const Tensor& a, const Tensor& b, Fn&& fn) {
  const auto sa = broadcast_strides(a, out.sizes(), "elementwise", "self");
  const auto sb = broadcast_strides(b, out.sizes(), "elementwise", "other");
  const kernels::StridedLoop<3> loop(out.sizes(), {DimSpan(out.strides()), DimSpan(sa), DimSpan(sb)});
  const auto step = loop.inner();
  Out* to = out.data<Out>();
  const A* pa = a.data<A>();
  const B* pb = b.data<B>();
  loop.run([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      to[at[0] + i * step[0]] = fn(pa[at[1] + i * step[1]], pb[at[2] + i * step[2]]);
    }
  });
}

// add's factor: whole for dtypes that are.
void check_alpha(DType dtype, double alpha, const char* op);

// The result tensor of an element-wise operator on a and b. On a GPU when either is.
TensorPtr binary_result(const Tensor& a, const Tensor& b, DType dtype, const char* op);

// dispatch_real and the complex types, as std::complex.
template <class Fn>
decltype(auto) dispatch_number(const char* op, DType dtype, Fn&& fn) {
  if (dtype == DType::kComplex64) return fn.template operator()<std::complex<float>>();
  if (dtype == DType::kComplex128) return fn.template operator()<std::complex<double>>();
  return dispatch_real(op, dtype, std::forward<Fn>(fn));
}
template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<std::complex<T>> = true;

// A 0-D tensor of a double, converted.
TensorPtr scalar_tensor(double value, DType dtype);
// Every element becomes the value, converted to the tensor's dtype.
void fill(const Tensor& t, double value);

}  // namespace untorch::shims
