// A convolution's spatial sizes as device code reads them: std::array is the host's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/convolution.h"

namespace untorch::kernels::cuda {

struct SpatialSizes {
  std::int64_t input[3], kernel[3], output[3], stride[3], padding[3], dilation[3];
};

inline SpatialSizes spatial_sizes(const ConvolutionShape& shape) {
  SpatialSizes sizes{};
  for (std::size_t d = 0; d < 3; ++d) {
    sizes.input[d] = shape.input[d];
    sizes.kernel[d] = shape.kernel[d];
    sizes.output[d] = shape.output[d];
    sizes.stride[d] = shape.stride[d];
    sizes.padding[d] = shape.padding[d];
    sizes.dilation[d] = shape.dilation[d];
  }
  return sizes;
}

}  // namespace untorch::kernels::cuda
