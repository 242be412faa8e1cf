// What LAPACK's operators compute on each device; on CUDA beside cuBLAS and cuSOLVER (native/cuda/solver.h).
//
// dtypes: float32, float64, complex64, complex128. Batches are `count` matrices one after the other, stored by columns
// (element (i, j) at j·rows + i) where nothing else is said.
#pragma once

#include <optional>

#include "base/strided.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Matrices with any strides, of a batch that broadcasts: operand 1 of `batch` gives their element offsets, operand 0
// the matrix's index in the batch.
struct MatrixBatch {
  const void* data = nullptr;
  std::int64_t row_stride = 0, col_stride = 0;
  Strided<2> batch;
};

// A row swap of an LU factorisation that names a row outside of its matrix.
struct BadPivot {
  std::int64_t matrix, position;
  std::int32_t row;
};

namespace cpu {
// x [n, n] := (L·Lᴴ)⁻¹, or (Uᴴ·U)⁻¹ when `upper`. Throws kModel where a diagonal element is zero.
void cholesky_inverse(const MatrixBatch& factor, std::int64_t n, bool upper, DType dtype, void* x);
// x [n, columns] := (L·Lᴴ)⁻¹·x, or (Uᴴ·U)⁻¹·x when `upper`.
void cholesky_solve(const MatrixBatch& factor, std::int64_t n, std::int64_t columns, bool upper, DType dtype, void* x);
// x [n, columns] := A⁻¹·x, or A⁻ᵀ·x when `transposed`, for A [n, n]; `unit`: the diagonal counts as ones.
void triangular_solve(std::int64_t count, std::int64_t n, std::int64_t columns, bool upper, bool transposed, bool unit,
                      DType dtype, const void* a, void* x);
// A [m, n] := R on and above the diagonal, below it the Householder vectors; tau [min(m, n)].
void geqrf(std::int64_t count, std::int64_t m, std::int64_t n, DType dtype, void* a, void* tau);
// C [m, columns] := Q·C, or Qᴴ·C when `adjoint`, with Q from `reflections` columns of V [m, n] and tau. `conjugated`: C
// is conjugated before and after.
void ormqr(std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t columns, std::int64_t reflections,
           bool adjoint, bool conjugated, DType dtype, const void* v, const void* tau, void* c);
// P [m, m] of A = P·L·U, row-major, from the row swaps [count, steps], counted from 1. Stops at a swap outside of its
// matrix and gives it.
std::optional<BadPivot> unpack_permutations(std::int64_t count, std::int64_t m, std::int64_t steps,
                                            const std::int32_t* swaps, DType dtype, void* p);
// L [m, k] with ones on the diagonal and U [k, n], k = min(m, n), of LU [m, n]; L and U row-major.
void unpack_factors(const MatrixBatch& lu, std::int64_t m, std::int64_t n, DType dtype, void* lower, void* upper);
}  // namespace cpu

namespace cuda {
// pointers[i] = base + i · step_bytes, for cuBLAS's batched calls.
int fill_pointers(std::int64_t count, const void* base, std::int64_t step_bytes, const void** pointers, Stream stream);
// `count` unit matrices [n, n].
int unit_matrices(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream);
// The lower triangle becomes the conjugate of the upper one, the diagonal real.
int make_hermitian(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream);
// As on the CPU. `order` [count, m] is scratch. A swap outside of the matrix is reported and not made.
int unpack_permutations(std::int64_t count, std::int64_t m, std::int64_t steps, const std::int32_t* swaps,
                        std::int64_t* order, DType dtype, void* p, FaultWord* faults, Stream stream);
// As on the CPU; `lu` [count, m, n] is row-major.
int unpack_factors(std::int64_t count, std::int64_t m, std::int64_t n, DType dtype, const void* lu, void* lower,
                   void* upper, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
