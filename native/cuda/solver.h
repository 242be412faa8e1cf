// TRSM by cuBLAS, GEQRF and ORMQR by cuSOLVER, opened at run time.
//
// dtypes are float32, float64, complex64 and complex128. Matrices are stored by columns and lie dense one after the
// other. Throws kUnsupported, with what to install, when the library is missing.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "cuda/driver.h"

namespace untorch::cuda {

struct TriangularSystem {
  bool upper = false;       // which triangle of A is read
  bool transposed = false;  // op(A) = Aᵀ, or Aᴴ when conjugated too
  bool conjugated = false;
  bool unit = false;  // the diagonal counts as ones and is not read
};

// cuBLAS's batched TRSM gives a small system to one CTA; large ones are worth a call each.
inline bool solves_in_batches(std::int64_t count, std::int64_t n) { return count > 4 && n <= 512; }

// B := op(A)⁻¹·B for every A [n, n] and B [n, columns]. `pointers`: device memory with the addresses of every A, then
// of every B, when solves_in_batches says so; not read otherwise.
void solve_triangular(const char* op, DType dtype, std::int64_t count, std::int64_t n, std::int64_t columns,
                      const TriangularSystem& system, const void* a, void* b, const void* const* pointers, int device,
                      Stream stream);

// A [m, n] := R on and above the diagonal, below it the Householder vectors; tau [min(m, n)].
void factor_qr(const char* op, DType dtype, std::int64_t count, std::int64_t m, std::int64_t n, void* a, void* tau,
               int device, Stream stream);

// C [m, n] := op(Q)·C or C·op(Q), with Q from `reflections` columns of V [left ? m : n, v_columns] and tau; op(Q) is Qᴴ
// when `adjoint`.
void apply_q(const char* op, DType dtype, std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t v_columns,
             std::int64_t reflections, bool left, bool adjoint, const void* v, const void* tau, void* c, int device,
             Stream stream);

}  // namespace untorch::cuda
