// Shared by the fronts of nvfp4_linear and nvfp4_moe: checks of dense arguments, and activations in float32.
#pragma once

#include <memory>
#include <optional>

#include "shims/matmul_checks.h"

namespace untorch::shims {

inline constexpr std::int64_t kNvfp4Block = 16;  // weights of a block scale

// Throws unless a dense tensor of this dtype and shape.
inline void check_is(const char* op, const char* argument, const Tensor& tensor, DType dtype, const Dims& sizes) {
  check(tensor.dtype() == dtype, op, ": argument '", argument, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
  check(tensor.sizes() == sizes, op, ": argument '", argument, "' must have shape ", to_string(sizes), ", got ",
        to_string(tensor.sizes()));
  check(tensor.is_contiguous(), op, ": argument '", argument, "' must be contiguous, got shape ",
        to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

inline const std::uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const std::uint8_t*>(tensor.raw()); }

// x in float32, its rows at one distance: itself, or a copy.
struct FloatRows {
  TensorPtr tensor;
  std::int64_t stride;
};
inline FloatRows float_rows(const Tensor& x) {
  TensorPtr rows = x.dtype() == DType::kFloat32 ? std::make_unique<Tensor>(x) : to_dtype(x, DType::kFloat32);
  if (const std::optional<std::int64_t> stride = row_stride_of(*rows)) return {std::move(rows), *stride};
  return {clone_contiguous(*rows), x.size(-1)};
}

}  // namespace untorch::shims
