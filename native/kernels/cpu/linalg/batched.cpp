// LAPACK's operators over batches: Cholesky solves and inverses, LU unpacking, QR factors, triangular systems.
//
// Many matrices run in parallel, one a thread; few of them run one by one, each on all threads (blocked.h).
#include <algorithm>
#include <complex>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/linalg/blocked.h"
#include "kernels/linalg.h"

namespace untorch::kernels::cpu {
namespace {

template <class Fn>
decltype(auto) dispatch_lapack(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn.template operator()<float>();
    case DType::kFloat64:
      return fn.template operator()<double>();
    case DType::kComplex64:
      return fn.template operator()<std::complex<float>>();
    default:
      return fn.template operator()<std::complex<double>>();
  }
}

template <class T>
MatrixRef<const T> matrix_of(const MatrixBatch& matrices, std::int64_t item) {
  const Strided<2>& batch = matrices.batch;
  std::int64_t offset = 0;
  for (int d = 0; d < batch.ndim; ++d) {
    offset += item % batch.sizes[d] * batch.strides[1][d];
    item /= batch.sizes[d];
  }
  return {static_cast<const T*>(matrices.data) + offset, matrices.row_stride, matrices.col_stride};
}

// Runs body(item, serial) for every matrix: many matrices in parallel, few of them one by one on all threads.
template <class Body>
void for_each_matrix(std::int64_t count, double operations_each, Body&& body) {
  const bool together = count > 3 && operations_each * static_cast<double>(count) > kParallelWork;
  for_each_item(count, together, [&](std::int64_t item) { body(item, together); });
}

double volume(std::int64_t a, std::int64_t b, std::int64_t c) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

// x := (L·Lᴴ)⁻¹·x, or (Uᴴ·U)⁻¹·x when `upper`; x [n, columns] by columns.
template <class T>
void solve_cholesky(std::int64_t n, std::int64_t columns, MatrixRef<const T> factor, bool upper, T* x, bool serial) {
  const MatrixRef<const T> adjoint{factor.data, factor.col_stride, factor.row_stride};
  const Triangle lower_triangle{false, false, upper}, upper_triangle{true, false, !upper};
  solve_triangular<T>(n, columns, upper ? adjoint : factor, lower_triangle, x, n, serial);
  solve_triangular<T>(n, columns, upper ? factor : adjoint, upper_triangle, x, n, serial);
}

// The lower triangle of x [n, n] by columns follows from the upper one, exactly, as LAPACK leaves it.
template <class T>
void make_hermitian(std::int64_t n, T* x) {
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = i; j < n; ++j) {
      if constexpr (std::is_floating_point_v<T>) {
        x[i * n + j] = x[j * n + i];
      } else {
        x[i * n + j] = i == j ? T(x[j * n + i].real()) : std::conj(x[j * n + i]);
      }
    }
  }
}

template <class T>
void conjugate(std::int64_t numel, T* values) {
  if constexpr (!std::is_floating_point_v<T>) {
    for (std::int64_t i = 0; i < numel; ++i) values[i] = std::conj(values[i]);
  }
}

}  // namespace

void cholesky_inverse(const MatrixBatch& factor, std::int64_t n, bool upper, DType dtype, void* x) {
  dispatch_lapack(dtype, [&]<class T>() {
    for_each_matrix(factor.batch.numel, volume(n, n, n), [&](std::int64_t item, bool serial) {
      const MatrixRef<const T> matrix = matrix_of<T>(factor, item);
      for (std::int64_t i = 0; i < n; ++i) {
        if (matrix.data[i * (matrix.row_stride + matrix.col_stride)] != T(0)) continue;
        throw_error(ErrorKind::kModel, "matrix ", item, " of the batch is singular: diagonal element ", i + 1,
                    " of its factor is zero");
      }
      T* inverse = static_cast<T*>(x) + item * n * n;
      std::fill_n(inverse, n * n, T(0));
      for (std::int64_t i = 0; i < n; ++i) inverse[i * (n + 1)] = T(1);
      solve_cholesky<T>(n, n, matrix, upper, inverse, serial);
      make_hermitian(n, inverse);
    });
  });
}

void cholesky_solve(const MatrixBatch& factor, std::int64_t n, std::int64_t columns, bool upper, DType dtype, void* x) {
  dispatch_lapack(dtype, [&]<class T>() {
    for_each_matrix(factor.batch.numel, 2 * volume(n, n, columns), [&](std::int64_t item, bool serial) {
      solve_cholesky<T>(n, columns, matrix_of<T>(factor, item), upper, static_cast<T*>(x) + item * n * columns, serial);
    });
  });
}

void triangular_solve(std::int64_t count, std::int64_t n, std::int64_t columns, bool upper, bool transposed, bool unit,
                      DType dtype, const void* a, void* x) {
  const Triangle triangle{upper != transposed, unit, false};
  dispatch_lapack(dtype, [&]<class T>() {
    for_each_matrix(count, volume(n, n, columns), [&](std::int64_t item, bool serial) {
      const T* matrix = static_cast<const T*>(a) + item * n * n;
      solve_triangular<T>(n, columns, {matrix, transposed ? n : 1, transposed ? 1 : n}, triangle,
                          static_cast<T*>(x) + item * n * columns, n, serial);
    });
  });
}

void geqrf(std::int64_t count, std::int64_t m, std::int64_t n, DType dtype, void* a, void* tau) {
  const std::int64_t k = std::min(m, n);
  dispatch_lapack(dtype, [&]<class T>() {
    for_each_matrix(count, 2 * volume(m, n, k), [&](std::int64_t item, bool serial) {
      factor_qr<T>(m, n, static_cast<T*>(a) + item * m * n, std::max<std::int64_t>(m, 1),
                   static_cast<T*>(tau) + item * k, serial);
    });
  });
}

void ormqr(std::int64_t count, std::int64_t m, std::int64_t n, std::int64_t columns, std::int64_t reflections,
           bool adjoint, bool conjugated, DType dtype, const void* v, const void* tau, void* c) {
  dispatch_lapack(dtype, [&]<class T>() {
    T* const target = static_cast<T*>(c);
    if (conjugated) conjugate(count * m * columns, target);
    for_each_matrix(count, 4 * volume(m, columns, reflections), [&](std::int64_t item, bool serial) {
      apply_reflections<T>(m, columns, reflections, static_cast<const T*>(v) + item * m * n, m,
                           static_cast<const T*>(tau) + item * reflections, adjoint, target + item * m * columns, m,
                           serial);
    });
    if (conjugated) conjugate(count * m * columns, target);
  });
}

std::optional<BadPivot> unpack_permutations(std::int64_t count, std::int64_t m, std::int64_t steps,
                                            const std::int32_t* swaps, DType dtype, void* p) {
  return dispatch_lapack(dtype, [&]<class T>() -> std::optional<BadPivot> {
    T* matrix = static_cast<T*>(p);
    std::fill_n(matrix, count * m * m, T(0));
    std::vector<std::int64_t> order(static_cast<std::size_t>(m));
    for (std::int64_t item = 0; item < count; ++item, matrix += m * m, swaps += steps) {
      std::iota(order.begin(), order.end(), 0);
      for (std::int64_t k = 0; k < steps; ++k) {
        if (swaps[k] < 1 || swaps[k] > m) return BadPivot{item, k, swaps[k]};
        std::swap(order[static_cast<std::size_t>(k)], order[static_cast<std::size_t>(swaps[k] - 1)]);
      }
      for (std::int64_t j = 0; j < m; ++j) matrix[order[static_cast<std::size_t>(j)] * m + j] = T(1);
    }
    return std::nullopt;
  });
}

void unpack_factors(const MatrixBatch& lu, std::int64_t m, std::int64_t n, DType dtype, void* lower, void* upper) {
  const std::int64_t k = std::min(m, n);
  dispatch_lapack(dtype, [&]<class T>() {
    T *l = static_cast<T*>(lower), *u = static_cast<T*>(upper);
    for (std::int64_t item = 0; item < lu.batch.numel; ++item) {
      const MatrixRef<const T> from = matrix_of<T>(lu, item);
      for (std::int64_t i = 0; i < m; ++i) {
        const T* row = from.data + i * from.row_stride;
        for (std::int64_t j = 0; j < k; ++j) *l++ = j < i ? row[j * from.col_stride] : T(i == j ? 1 : 0);
        if (i >= k) continue;
        for (std::int64_t j = 0; j < n; ++j) *u++ = j < i ? T(0) : row[j * from.col_stride];
      }
    }
  });
}

}  // namespace untorch::kernels::cpu
