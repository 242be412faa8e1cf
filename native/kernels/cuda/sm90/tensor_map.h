// Tensor maps: the TMA descriptors of row-major matrices, of stacks of them and of heads (sm_90 and newer). Encoded on
// the host, by the driver.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// CUtensorMap; a kernel takes it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
  std::uint64_t words[16];
};

// A TMA load fills out-of-bounds elements with zeros.
struct TensorMapSpec {
  const void* base = nullptr;  // 16-byte aligned
  int element_bytes = 2;       // or 1 or 4
  std::int64_t rows = 0, columns = 0;
  std::int64_t row_bytes = 0;         // the stride of rows, a multiple of 16
  int box_rows = 0, box_columns = 0;  // of one load (boxDim), at most 256; dense in shared memory
  bool swizzle = false;               // 128-byte swizzle, as WGMMA reads it: rows of a load have 128 bytes
  // Above 0: a three-dimensional map of that many matrices, matrix_bytes apart (a multiple of 16); a box is of one.
  std::int64_t matrices = 0, matrix_bytes = 0;
};

// [outer, middle, rows, columns] of 2-byte elements, such as attention's batch, heads, rows and width; a load is one
// box of rows, of box_middle of the middle one after the other, of box_outer of the outer one, 64 columns wide, with
// 128-byte swizzle. Dimensions may overlap.
struct TensorMap4dSpec {
  const void* base = nullptr;  // 16-byte aligned
  std::int64_t outer = 1, middle = 1, rows = 0, columns = 0;
  std::int64_t outer_bytes = 0, middle_bytes = 0, row_bytes = 0;  // strides: multiples of 16, above 0, below 2^40
  int box_rows = 0, box_middle = 1, box_outer = 1;                // at most 256 each
};

// cuTensorMapEncodeTiled. 0, or a driver's error code.
int encode_tensor_map(const TensorMapSpec& spec, TensorMap& out);
int encode_tensor_map(const TensorMap4dSpec& spec, TensorMap& out);

}  // namespace untorch::kernels::cuda
