// What the operators of LAPACK need beside cuBLAS and cuSOLVER. dtypes: float32, float64, complex64, complex128.
#pragma once

#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// pointers[i] = base + i · step_bytes, for batched calls of cuBLAS.
int fill_pointers(std::int64_t count, const void* base, std::int64_t step_bytes, const void** pointers, Stream stream);
// `count` unit matrices [n, n].
int unit_matrices(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream);
// Matrices stored by columns: the lower triangle becomes the conjugate of the upper one, the diagonal real.
int make_hermitian(std::int64_t count, std::int64_t n, DType dtype, void* out, Stream stream);

// P [count, m, m] of A = P·L·U from the row swaps [count, steps], counted from 1. `order` [count, m] is scratch. A swap
// outside of the matrix is reported and not made.
int unpack_permutations(std::int64_t count, std::int64_t m, std::int64_t steps, const std::int32_t* swaps,
                        std::int64_t* order, DType dtype, void* p, FaultWord* faults, Stream stream);
// L [count, m, k] with ones on the diagonal and U [count, k, n], k = min(m, n), of [count, m, n]; all row-major.
int unpack_factors(std::int64_t count, std::int64_t m, std::int64_t n, DType dtype, const void* lu, void* lower,
                   void* upper, Stream stream);

}  // namespace untorch::kernels::cuda
