// Loops over strided operands and over lanes, on all cores when the work is worth it: what elementwise kernels and
// kernels along one dimension run in. Operand 0 is the output; neighbouring iterations are neighbours in its memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/lanes.h"
#include "kernels/cpu/common/strided_loop.h"

namespace untorch::kernels::cpu {

// out[i] = fn(a[i]).
template <class Out, class In, class Fn>
void map_unary(const Strided<2>& space, Out* out, const In* a, Fn&& fn) {
  const StridedLoop<2> loop(space);
  const auto step = loop.inner();
  loop.run([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) out[at[0] + i * step[0]] = fn(a[at[1] + i * step[1]]);
  });
}

// out[i] = fn(a[i], b[i]).
template <class Out, class A, class B, class Fn>
void map_binary(const Strided<3>& space, Out* out, const A* a, const B* b, Fn&& fn) {
  const StridedLoop<3> loop(space);
  const auto step = loop.inner();
  loop.run([&](const std::array<std::int64_t, 3>& at, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i) {
      out[at[0] + i * step[0]] = fn(a[at[1] + i * step[1]], b[at[2] + i * step[2]]);
    }
  });
}

// body(offsets): the element offset of every row's first element, in each operand. Parallel over rows, of which one
// costs as much as `cost` elements; the body may throw.
template <int N, class Body>
void for_each_lane(const Lanes<N>& lanes, std::int64_t cost, Body&& body) {
  using Offsets = typename StridedLoop<N>::Offsets;
  const StridedLoop<N> loop(lanes.rows);
  const Offsets step = loop.inner();
  loop.run(
      [&](const Offsets& start, std::int64_t n) {
        Offsets at = start;
        for (std::int64_t i = 0; i < n; ++i) {
          body(static_cast<const Offsets&>(at));
          for (std::size_t k = 0; k < at.size(); ++k) at[k] += step[k];
        }
      },
      std::max<std::int64_t>(cost, 1));
}

}  // namespace untorch::kernels::cpu
