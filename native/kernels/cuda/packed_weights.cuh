// Where packed weights of four bits lie in a tile of 8 columns and 128 k's.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

inline constexpr int kPackedBlockK = 128;  // k's of a block of weights, 512 bytes a tile of 8 columns

// Where word j (32 k's) of a lane lies among the 128 words of a tile's block.
__device__ __forceinline__ int word_at(int words_of_lane, int j, int lane) {
  return j / words_of_lane * (32 * words_of_lane) + lane * words_of_lane + j % words_of_lane;
}

}  // namespace untorch::kernels::cuda
