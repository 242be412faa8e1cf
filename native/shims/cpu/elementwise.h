// The CPU's loops of elementwise operators and operators along one dimension.
#pragma once

#include <array>
#include <vector>

#include "kernels/cpu/common/strided_loop.h"
#include "shims/broadcast.h"
#include "shims/layout.h"
#include "shims/promotion.h"
#include "shims/shim.h"
#include "tensor/iteration.h"

namespace untorch::shims {

// A factory's dtype, layout and device arguments, checked: strided and on the CPU.
void check_factory(const std::int32_t* layout, const std::int32_t* device, const char* op);

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

// Every element becomes the value, converted to the tensor's dtype.
void fill(const Tensor& t, double value);

}  // namespace untorch::shims
