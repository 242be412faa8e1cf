// A weight in int4 on the CPU: values, packed for tensor cores, and a scale and a zero for each group.
#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace untorch::kernels {

// The largest group, a multiple of kInt4Group; rows of a tile, columns of a block.
inline constexpr std::int64_t kInt4MostGroup = 1024, kInt4Group = 32, kInt4Rows = 8, kInt4Columns = 128;

// A weight [rows, k] of finite values; w becomes (q - 8)·scale + zero, q from 0 to 15. What is behind rows and k has
// q = 8 and scale and zero 0, but for a group that begins before k.
struct Int4Quantization {
  std::int64_t rows, k;
  DType dtype;         // float32, bfloat16 or float16: of the weight, scales and zeros
  const void* weight;  // rows `stride` elements apart
  std::int64_t stride;
  std::int64_t group;
  std::int64_t padded_rows, padded_k;  // multiples of kInt4Rows and kInt4Columns
  bool by_range;         // the least value of a group becomes q = 0, the largest q = 15; else they are given
  void* scale_and_zero;  // [padded_k / group][padded_rows][2]
  std::int32_t* packed;  // as untorch/ops/int4_layout.py says, with inner_k_tiles = 8
  double* sums;          // [rows][2]: the squares of the errors, and of the weights
};

// The result does not depend on the number of threads.
void quantize_int4(const Int4Quantization& p);

}  // namespace untorch::kernels
