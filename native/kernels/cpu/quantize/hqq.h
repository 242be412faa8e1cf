// Half-quadratic quantization (HQQ) of a weight to four bits on the CPU: a scale and a zero for each group.
#pragma once

#include <cstdint>

namespace untorch::kernels {

// The largest group.
inline constexpr std::int64_t kHqqMostGroup = 1024;

// A weight [rows, k] of finite values in groups of `group` along k; w becomes (q - 8)·scale + zero, q from 0 to 15. The
// last groups hold what is left of k, or nothing.
struct Hqq {
  std::int64_t rows, k;
  const float* weight;  // rows `stride` elements apart
  std::int64_t stride;
  std::int64_t group, groups;
  float* out;  // [rows][groups][2]: scale, zero; 0 and 0 for a group of nothing
};

// The result does not depend on the number of threads.
void hqq(const Hqq& p);

}  // namespace untorch::kernels
