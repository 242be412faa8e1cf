// Where packed weights of four bits lie in a tile of 8 columns and 128 k's; and sums of them that are scaled by group.
#pragma once

#include "kernels/cuda/w4a16/problem.h"

namespace untorch::kernels::cuda {

// Where word j (32 k's) of a lane lies among the 128 words of a tile's block.
__device__ __forceinline__ int word_at(int words_of_lane, int j, int lane) {
  return j / words_of_lane * (32 * words_of_lane) + lane * words_of_lane + j % words_of_lane;
}

// What makes sums of codes times x over a group sums of weights: ·scale, and rest times the sum of x.
struct GroupFactors {
  float scale, rest;
};
// Two rows' sums of a column.
__device__ __forceinline__ void add_group(float& first, float& second, float sum_first, float sum_second,
                                          GroupFactors by, float2 x) {
  first = fmaf(by.scale, sum_first, fmaf(by.rest, x.x, first));
  second = fmaf(by.scale, sum_second, fmaf(by.rest, x.y, second));
}

}  // namespace untorch::kernels::cuda
