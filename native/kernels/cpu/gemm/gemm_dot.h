// Small-M GEMM with a B whose columns are contiguous (x·Wᵀ with W row-major): dot products along k, no packing.
// Included by *.isa.cpp files only.
//
// A tile of 4×4 sums keeps 16 chains of FMAs for 8 loads a step. Every element of C is summed lane by lane in the order
// of k and then across the lanes in one fixed tree, for every tile size.
#pragma once

#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {

inline constexpr int kDotRows = 4;

// x and y, each folded once upon itself, interleaved.
template <class T>
[[gnu::always_inline]] inline Vector<T> fold_pair(Vector<T> x, Vector<T> y) {
  if constexpr (kLanes<T> == 16) {
    return __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23) +
           __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  } else if constexpr (kLanes<T> == 8) {
    return __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11) +
           __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
  } else if constexpr (kLanes<T> == 4) {
    return __builtin_shufflevector(x, y, 0, 4, 1, 5) + __builtin_shufflevector(x, y, 2, 6, 3, 7);
  } else {
    return __builtin_shufflevector(x, y, 0, 2) + __builtin_shufflevector(x, y, 1, 3);
  }
}

// The sums of the lanes of four vectors.
template <class T>
[[gnu::always_inline]] inline void sum_lanes(const Vector<T> (&v)[4], T (&out)[4]) {
  if constexpr (kLanes<T> == 2) {
    const Vector<T> lo = fold_pair<T>(v[0], v[1]), hi = fold_pair<T>(v[2], v[3]);
    out[0] = lo[0], out[1] = lo[1], out[2] = hi[0], out[3] = hi[1];
  } else {
    Vector<T> r = fold_pair<T>(fold_pair<T>(v[0], v[2]), fold_pair<T>(v[1], v[3]));
    if constexpr (kLanes<T> == 16)
      r += __builtin_shufflevector(r, r, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (kLanes<T> == 16) r += __builtin_shufflevector(r, r, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3);
    if constexpr (kLanes<T> == 8) r += __builtin_shufflevector(r, r, 4, 5, 6, 7, 0, 1, 2, 3);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) out[i] = r[i];
  }
}

// C[MR, NR] = alpha·(rows of A · columns of B) + beta·C. Sums are reduced in groups of four.
template <class T, int MR, int NR>
[[gnu::noinline]] void dot_tile(std::int64_t k, T alpha, const T* a, std::int64_t lda, const T* b, std::int64_t ldb,
                                T beta, T* c, std::int64_t c_row, std::int64_t c_col) {
  using V = Vector<T>;
  constexpr int N = kLanes<T>;
  constexpr int G = (NR + 3) / 4;
  V acc[MR][G][4] = {};
  std::int64_t kk = 0;
  for (; kk + N <= k; kk += N) {
    V y[NR];
#pragma GCC unroll 8
    for (int j = 0; j < NR; ++j) y[j] = load(b + j * ldb + kk);
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
      const V x = load(a + i * lda + kk);
#pragma GCC unroll 8
      for (int j = 0; j < NR; ++j) acc[i][j / 4][j % 4] += x * y[j];
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 2
    for (int g = 0; g < G; ++g) {
      T sums[4];
      sum_lanes<T>(acc[i][g], sums);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (g * 4 + j >= NR) continue;
        T sum = sums[j];
        for (std::int64_t x = kk; x < k; ++x) sum += a[i * lda + x] * b[(g * 4 + j) * ldb + x];
        T* to = c + i * c_row + (g * 4 + j) * c_col;
        *to = beta == T(0) ? alpha * sum : alpha * sum + beta * *to;
      }
    }
  }
}

template <class T, int MR>
void dot_rows(std::int64_t n, std::int64_t k, T alpha, const T* a, std::int64_t lda, const T* b, std::int64_t ldb,
              T beta, T* c, std::int64_t c_row, std::int64_t c_col) {
  constexpr int kWide = MR == 1 ? 8 : 4;
  std::int64_t j = 0;
  for (; j + kWide <= n; j += kWide) {
    dot_tile<T, MR, kWide>(k, alpha, a, lda, b + j * ldb, ldb, beta, c + j * c_col, c_row, c_col);
  }
  for (; j < n; ++j) dot_tile<T, MR, 1>(k, alpha, a, lda, b + j * ldb, ldb, beta, c + j * c_col, c_row, c_col);
}

// C = alpha·A·B + beta·C with A [m, k] of row stride lda and B [k, n] of column stride ldb, both contiguous along k.
template <class T>
void dot_gemm(std::int64_t m, std::int64_t n, std::int64_t k, T alpha, const T* a, std::int64_t lda, const T* b,
              std::int64_t ldb, T beta, T* c, std::int64_t c_row, std::int64_t c_col) {
  // Columns in blocks that stay in L1 while the rows pass.
  const std::int64_t block = m <= kDotRows ? n : 4;
  for (std::int64_t j = 0; j < n; j += block) {
    const std::int64_t width = n - j < block ? n - j : block;
    for (std::int64_t i = 0; i < m;) {
      const T* rows = a + i * lda;
      const T* cols = b + j * ldb;
      T* to = c + i * c_row + j * c_col;
      switch (m - i) {
        case 1:
          dot_rows<T, 1>(width, k, alpha, rows, lda, cols, ldb, beta, to, c_row, c_col);
          i += 1;
          break;
        case 2:
          dot_rows<T, 2>(width, k, alpha, rows, lda, cols, ldb, beta, to, c_row, c_col);
          i += 2;
          break;
        case 3:
          dot_rows<T, 3>(width, k, alpha, rows, lda, cols, ldb, beta, to, c_row, c_col);
          i += 3;
          break;
        default:
          dot_rows<T, 4>(width, k, alpha, rows, lda, cols, ldb, beta, to, c_row, c_col);
          i += 4;
          break;
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
