// Operands of a GEMM as its drivers want them, and memory for packing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels {

template <class T>
MatrixRef<T> transposed(MatrixRef<T> x) {
  return {x.data, x.col_stride, x.row_stride};
}

template <class T>
MatrixRef<T> part(MatrixRef<T> x, std::int64_t row, std::int64_t col) {
  return {x.data + row * x.row_stride + col * x.col_stride, x.row_stride, x.col_stride};
}

// Strides that the fast paths ask for, wherever they are free; Cᵀ = Bᵀ·Aᵀ where that is the faster GEMM.
template <class T>
void orient(std::int64_t& m, std::int64_t& n, std::int64_t k, MatrixRef<const T>& a, MatrixRef<const T>& b,
            MatrixRef<T>& c) {
  if (k == 1) a.col_stride = 1, b.row_stride = b.col_stride == 1 ? b.row_stride : 1;
  if (n == 1) b.col_stride = b.row_stride == 1 ? k : 1, c.col_stride = 1;
  if (m == 1) a.row_stride = a.col_stride == 1 ? k : 1, c.row_stride = n;
  // A column-major C, or a few columns against many contiguous rows.
  if ((c.col_stride != 1 && c.row_stride == 1) || (n < m && n <= 8 && a.col_stride == 1 && b.row_stride == 1)) {
    std::swap(m, n);
    const MatrixRef<const T> left = transposed(b);
    b = transposed(a), a = left, c = transposed(c);
  }
}

// Memory that the calling thread keeps between calls; what an earlier call got is gone. Throws std::bad_alloc.
void* gemm_scratch(std::size_t nbytes);

}  // namespace untorch::kernels
