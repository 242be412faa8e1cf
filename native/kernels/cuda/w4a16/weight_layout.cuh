// Word order of the packed 4-bit weight within an 8-column tile's k block; and group scales applied to partial sums.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// The index of a lane's word j (32 k) among the 128 words of a tile's k block.
__device__ __forceinline__ int word_index(int lane_words, int j, int lane) {
  return j / lane_words * (32 * lane_words) + lane * lane_words + j % lane_words;
}

// Σ w·x over a group = scale · Σ q·x + offset · Σ x.
struct GroupScale {
  float scale, offset;
};
// For two rows of x and one column: x has their Σ x.
__device__ __forceinline__ void accumulate_group(float& first, float& second, float sum_first, float sum_second,
                                                 GroupScale group, float2 x) {
  first = fmaf(group.scale, sum_first, fmaf(group.offset, x.x, first));
  second = fmaf(group.scale, sum_second, fmaf(group.offset, x.y, second));
}

}  // namespace untorch::kernels::cuda
