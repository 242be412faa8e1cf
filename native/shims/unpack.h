// Packed weights as whole matrices, for GPUs with room for them: the loader makes these and leaves them beside the
// packed values, and products with many rows read them instead.
#pragma once

#include <array>
#include <cstdint>

#include "tensor/tensor.h"

namespace untorch {

// What Storage::unpacked of a packed weight is: [n, k], and the scales that it was made with. A weight whose bytes
// equal another's is stored once, and may have other scales.
struct DequantizedWeight {
  Tensor matrix;
  std::array<const void*, 2> scales{};

  bool is_of(const Tensor& first, const Tensor* second = nullptr) const noexcept {
    return scales[0] == first.raw() && scales[1] == (second == nullptr ? nullptr : second->raw());
  }
};

namespace shims {

// Filled by the CUDA shims, where they are built. Each gives a matrix in `dtype`, float32, bfloat16 or float16, outside
// the memory pool; it is ready in the order of the device's current stream. Throws where the tensors are no such
// weight.
struct Dequantizers {
  TensorPtr (*int4)(const Tensor& weight, const Tensor& scale_and_zero, std::int64_t group_size, DType dtype) = nullptr;
  TensorPtr (*nvfp4)(const Tensor& weight, const Tensor& block_scale, const Tensor& global_scale,
                     DType dtype) = nullptr;
};
inline Dequantizers cuda_dequantizers;

}  // namespace shims
}  // namespace untorch
