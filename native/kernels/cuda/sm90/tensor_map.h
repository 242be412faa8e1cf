// Matrices of which the GPU copies boxes to shared memory by itself, on sm_90 and newer.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// What the hardware reads: a kernel's parameter, __grid_constant__.
struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

// Elements outside the matrix are zeros in a box.
struct MatrixOfBoxes {
  const void* from = nullptr;  // 16-byte aligned
  int element_bytes = 2;       // or 1 or 4
  std::int64_t rows = 0, columns = 0;
  std::int64_t row_bytes = 0;         // from a row to the next, a multiple of 16
  int box_rows = 0, box_columns = 0;  // at most 256; a box's rows lie one after the other
  bool swizzle = false;               // rows of 128 bytes, permuted as the warpgroup instruction's 128-byte swizzle
};

// 0, or a driver's error code.
int make_tensor_map(const MatrixOfBoxes& matrix, TensorMap& out);

}  // namespace untorch::kernels::cuda
