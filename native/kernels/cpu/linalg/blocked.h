// Blocked TRSM, GEQRF and ORMQR of one matrix: triangular systems and Householder reflections.
//
// T is float, double, std::complex<float> or std::complex<double>. A matrix that is written is stored by columns, as
// LAPACK's are: element (i, j) at j·ld + i. `serial` keeps the work on the calling thread, for callers that are
// parallel themselves. Everything may throw std::bad_alloc.
#pragma once

#include <complex>
#include <cstdint>
#include <type_traits>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {

// What op(A) stands for is in the strides of `a` (swapped: transposed) and in `conjugate`.
struct Triangle {
  bool upper;      // which triangle of the view `a` is read
  bool unit;       // the diagonal counts as ones and is not read
  bool conjugate;  // every element is conjugated (nothing happens to real ones)
};

// B := A⁻¹·B, A [n, n] triangular, B [n, columns]. A zero on the diagonal divides: infinities and NaN.
template <class T>
void solve_triangular(std::int64_t n, std::int64_t columns, MatrixRef<const T> a, Triangle triangle, T* b,
                      std::int64_t ldb, bool serial);

// A [m, n] := R on and above the diagonal, below it the Householder vectors v_i (their leading 1 is not stored), and
// tau [min(m, n)]: A = H_0·H_1·…·R with H_i = 1 - tau_i·v_i·v_iᴴ. Signs and scaling are LAPACK's (?geqrf).
template <class T>
void factor_qr(std::int64_t m, std::int64_t n, T* a, std::int64_t lda, T* tau, bool serial);

// C := Q·C, or Qᴴ·C when `adjoint`, with Q [m, m] = H_0·…·H_(count-1) from factor_qr's `v` and `tau`, C [m, columns].
template <class T>
void apply_reflections(std::int64_t m, std::int64_t columns, std::int64_t count, const T* v, std::int64_t ldv,
                       const T* tau, bool adjoint, T* c, std::int64_t ldc, bool serial);

}  // namespace untorch::kernels::cpu
