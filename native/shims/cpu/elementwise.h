// The CPU's loop over lanes of tensors. kernels/cpu/common/map.h has it on Lanes.
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

}  // namespace untorch::shims
