// What the packed convolutions' fronts share: pairs of sizes, and operands in NHWC.
#pragma once

#include <array>
#include <cstdint>

#include "shims/nn.h"
#include "shims/shim.h"

namespace untorch::shims {

inline std::array<std::int64_t, 2> pair_of(const char* op, const std::int64_t* values, std::int64_t count,
                                           std::int64_t least, const char* name) {
  check(values != nullptr && count == 2, op, ": argument '", name, "' must have 2 values, got ", count);
  for (int d = 0; d < 2; ++d) {
    check(values[d] >= least, op, ": argument '", name, "' must be at least ", least, ", got ",
          to_string(ints(values, count)));
  }
  return {values[0], values[1]};
}

// Whether the channels of [n, c, h, w] lie side by side.
inline bool has_dense_pixels(const Tensor& x) { return x.size(1) <= 1 || x.stride(1) == 1; }

inline bool is_nhwc(const Tensor& x) {
  const std::int64_t c = x.size(1), w = x.size(3), h = x.size(2);
  return has_dense_pixels(x) && (w <= 1 || x.stride(3) == c) && (h <= 1 || x.stride(2) == w * c) &&
         (x.size(0) <= 1 || x.stride(0) == h * w * c);
}

inline TensorPtr empty_nhwc(DimSpan sizes, DType dtype) {
  const std::int64_t c = sizes[1], h = sizes[2], w = sizes[3];
  const std::int64_t strides[] = {h * w * c, 1, w * c, c};
  return Tensor::empty_strided(sizes, strides, dtype);
}

inline TensorPtr nhwc_copy(const Tensor& x) {
  TensorPtr out = empty_nhwc(x.sizes(), x.dtype());
  copy_cpu(*out, x);
  return out;
}

}  // namespace untorch::shims
