// Packing for the GEMM: B into panels, A into rows of a harmless stride. Included by *.isa.cpp files only.
#pragma once

#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

// dst[i][j] (stride ld) = src[i·row_stride + j·col_stride] for i < rows, j < cols; column-major sources are transposed
// by blocks.
template <class T>
void copy_rows(std::int64_t rows, std::int64_t cols, const T* src, std::int64_t row_stride, std::int64_t col_stride,
               T* dst, std::int64_t ld) {
  constexpr int N = kLanes<T>;
  if (col_stride == 1) {
    for (std::int64_t i = 0; i < rows; ++i) {
      const T* from = src + i * row_stride;
      T* to = dst + i * ld;
      std::int64_t j = 0;
      for (; j + N <= cols; j += N) store(to + j, load(from + j));
      for (; j < cols; ++j) to[j] = from[j];
    }
    return;
  }
  std::int64_t full_rows = 0, full_cols = 0;
  if (row_stride == 1) {
    full_rows = rows / N * N;
    full_cols = cols / N * N;
    for (std::int64_t j = 0; j < full_cols; j += N) {
      for (std::int64_t i = 0; i < full_rows; i += N) {
        Vector<T> v[N];
#pragma GCC unroll 16
        for (int x = 0; x < N; ++x) v[x] = load(src + i + (j + x) * col_stride);
        transpose<T, N>(v);
#pragma GCC unroll 16
        for (int x = 0; x < N; ++x) store(dst + (i + x) * ld + j, v[x]);
      }
    }
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = i < full_rows ? full_cols : 0; j < cols; ++j)
      dst[i * ld + j] = src[i * row_stride + j * col_stride];
  }
}

// One panel: dst[kk][0…panel) = B[kk][0…width), zero beyond width.
template <class T>
void pack_panel(std::int64_t k, std::int64_t width, const T* b, std::int64_t row_stride, std::int64_t col_stride,
                T* dst) {
  constexpr int P = kPanel<T>;
  if (width < P) {
    for (std::int64_t kk = 0; kk < k; ++kk) {
      for (std::int64_t j = width; j < P; ++j) dst[kk * P + j] = T(0);
    }
  }
  if (width == P && col_stride == 1) {
    for (std::int64_t kk = 0; kk < k; ++kk) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsPerPanel; ++v)
        store(dst + kk * P + v * kLanes<T>, load(b + kk * row_stride + v * kLanes<T>));
    }
    return;
  }
  copy_rows(k, width, b, row_stride, col_stride, dst, P);
}

// B [k, n] into [ceil(n/panel)][k][panel].
template <class T>
void pack_panels(std::int64_t k, std::int64_t n, const T* b, std::int64_t row_stride, std::int64_t col_stride, T* dst) {
  constexpr int P = kPanel<T>;
  // Rows of B are read in strips, so that a strip's pages and cache lines are still there for the next panel.
  const std::int64_t strip = col_stride == 1 ? 16 : k;
  for (std::int64_t i = 0; i < k; i += strip) {
    const std::int64_t rows = k - i < strip ? k - i : strip;
    for (std::int64_t j = 0; j < n; j += P) {
      pack_panel(rows, n - j < P ? n - j : P, b + i * row_stride + j * col_stride, row_stride, col_stride,
                 dst + j * k + i * P);
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
