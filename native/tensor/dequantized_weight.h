// The dequantized copy of a packed weight, which the loader leaves beside it on a GPU with room for both: GEMMs with a
// large M read it instead.
#pragma once

#include <array>

#include "tensor/tensor.h"

namespace untorch {

// Storage::dequantized of the packed weight: [n, k], and the scales that it was made with. A weight whose bytes equal
// another's is stored once, and may have other scales.
struct DequantizedWeight {
  Tensor matrix;
  std::array<const void*, 2> scales{};

  bool is_of(const Tensor& first, const Tensor* second = nullptr) const noexcept {
    return scales[0] == first.raw() && scales[1] == (second == nullptr ? nullptr : second->raw());
  }
};

}  // namespace untorch
