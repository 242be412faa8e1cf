// Antialiased resizing of images, one axis at a time.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels {

enum class ResizeFilter : int { kLinear, kCubic };  // supports of 1 and 2; Keys' cubic with a = -0.5

// Row-major [outer, size, inner] to [outer, target, inner]. Each element of the target is a weighted mean of those
// within the filter's support, which a scale (input steps an output step) above 1 stretches.
struct ResizeAxis {
  const void* input = nullptr;
  void* out = nullptr;
  DType in_dtype = DType::kFloat32, out_dtype = DType::kFloat32;  // floating; one of them may be wider
  std::int64_t outer = 0, size = 0, inner = 0, target = 0;
  double scale = 1;
  ResizeFilter filter = ResizeFilter::kLinear;
};

namespace cuda {
int resize_axis(const ResizeAxis& p, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
