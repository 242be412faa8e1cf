// Grid sampling: values of a volume at fractional positions.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels {

enum class GridPadding : std::int8_t { kZeros = 0, kBorder = 1, kReflection = 2 };

// grid_at is [batch, coordinate, d, h, w]; coordinates are x, y, z. The output is row-major.
struct GridSample {
  std::int64_t batch, channels, input[3], output[3];  // (depth, height, width)
  std::int64_t in_at[5], grid_at[5];                  // strides: batch, channel or last, spatial
  GridPadding padding;
  bool nearest, align_corners;
};

namespace cpu {
void grid_sample(const GridSample& problem, DType dtype, const void* input, const void* grid, void* output);
}
namespace cuda {
int grid_sample(const GridSample& problem, DType dtype, const void* input, const void* grid, void* output,
                Stream stream);
}

}  // namespace untorch::kernels
