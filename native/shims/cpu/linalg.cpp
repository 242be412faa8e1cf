// Operators of LAPACK on the CPU: Cholesky solves and inverses, LU unpacking, QR factors, triangular systems.
//
// Matrix results are stored by columns, as eager PyTorch's are, lu_unpack's excepted.
#include "kernels/cpu/linalg/linalg.h"

#include <algorithm>
#include <complex>
#include <numeric>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/linalg.h"

namespace untorch::shims {
namespace {

using kernels::MatrixRef;
using kernels::Triangle;

template <class Fn>
decltype(auto) dispatch_lapack(const char* op, const char* argument, DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn.template operator()<float>();
    case DType::kFloat64:
      return fn.template operator()<double>();
    case DType::kComplex64:
      return fn.template operator()<std::complex<float>>();
    case DType::kComplex128:
      return fn.template operator()<std::complex<double>>();
    default:
      throw_error(ErrorKind::kUnsupported, op, ": argument '", argument,
                  "' must be float32, float64, complex64 or complex128, got ", dtype_name(dtype),
                  "; convert it in the model");
  }
}

// Where matrix `item` of the batch begins in a tensor that broadcasts to the batch, in elements.
std::int64_t item_offset(const Tensor& tensor, DimSpan batch, std::int64_t item) {
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < batch.size(); ++d) {
    const std::int64_t size = batch[batch.size() - 1 - d];
    const auto from_end = static_cast<std::int64_t>(d) + 3;
    if (from_end <= tensor.dim() && tensor.size(-from_end) != 1) offset += item % size * tensor.stride(-from_end);
    item /= size;
  }
  return offset;
}

template <class T>
MatrixRef<const T> item_of(const Tensor& tensor, DimSpan batch, std::int64_t item) {
  return {tensor.data<const T>() + item_offset(tensor, batch, item), tensor.stride(-2), tensor.stride(-1)};
}

// Runs body(item, serial) for every matrix: many matrices in parallel, few of them one by one on all threads.
template <class Body>
void for_each_matrix(std::int64_t count, double operations_each, Body&& body) {
  const bool together = count > 3 && operations_each * static_cast<double>(count) > kernels::kParallelWork;
  kernels::for_each_item(count, together, [&](std::int64_t item) { body(item, together); });
}

double volume(std::int64_t a, std::int64_t b, std::int64_t c) {
  return static_cast<double>(a) * static_cast<double>(b) * static_cast<double>(c);
}

// x := (L·Lᴴ)⁻¹·x, or (Uᴴ·U)⁻¹·x when `upper`; x [n, columns] by columns.
template <class T>
void solve_cholesky(std::int64_t n, std::int64_t columns, MatrixRef<const T> factor, bool upper, T* x, bool serial) {
  const MatrixRef<const T> adjoint{factor.data, factor.col_stride, factor.row_stride};
  const Triangle lower_triangle{false, false, upper}, upper_triangle{true, false, !upper};
  kernels::solve_triangular<T>(n, columns, upper ? adjoint : factor, lower_triangle, x, n, serial);
  kernels::solve_triangular<T>(n, columns, upper ? factor : adjoint, upper_triangle, x, n, serial);
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

// The values of a dense tensor, conjugated in place.
template <class T>
void conjugate_dense(const Tensor& tensor) {
  if constexpr (!std::is_floating_point_v<T>) {
    T* value = tensor.data<T>();
    for (std::int64_t i = 0; i < tensor.numel(); ++i) value[i] = std::conj(value[i]);
  }
}

// P of A = P·L·U: the row swaps, in the order that the factorisation made them, counted from 1.
template <class T>
void unpack_permutations(const char* op, const Tensor& pivots, const Tensor& p) {
  const TensorPtr dense = contiguous(pivots);
  const std::int64_t m = p.size(-1), steps = pivots.size(-1);
  std::fill_n(p.data<T>(), p.numel(), T(0));
  std::vector<std::int64_t> order(static_cast<std::size_t>(m));
  for (std::int64_t item = 0; item * m * m < p.numel(); ++item) {
    const std::int32_t* swaps = dense->data<std::int32_t>() + item * steps;
    std::iota(order.begin(), order.end(), 0);
    for (std::int64_t k = 0; k < steps; ++k) {
      check(swaps[k] >= 1 && swaps[k] <= m, op, ": argument 'LU_pivots' must hold rows from 1 to ", m, ", got ",
            swaps[k], " at position ", k, " of matrix ", item, "; pass the pivots of lu_factor");
      std::swap(order[static_cast<std::size_t>(k)], order[static_cast<std::size_t>(swaps[k] - 1)]);
    }
    T* matrix = p.data<T>() + item * m * m;
    for (std::int64_t j = 0; j < m; ++j) matrix[order[static_cast<std::size_t>(j)] * m + j] = T(1);
  }
}

// L [m, k] with ones on the diagonal and U [k, n] of the factors in one matrix.
template <class T>
void unpack_factors(const Tensor& lu, const Tensor& lower, const Tensor& upper) {
  const std::int64_t m = lu.size(-2), n = lu.size(-1), k = std::min(m, n);
  const DimSpan batch = batch_of(lu);
  const std::int64_t count = checked_numel(batch);
  for (std::int64_t item = 0; item < count; ++item) {
    const MatrixRef<const T> from = item_of<T>(lu, batch, item);
    T* l = lower.data<T>() + item * m * k;
    T* u = upper.data<T>() + item * k * n;
    for (std::int64_t i = 0; i < m; ++i) {
      const T* row = from.data + i * from.row_stride;
      for (std::int64_t j = 0; j < k; ++j) *l++ = j < i ? row[j * from.col_stride] : T(i == j ? 1 : 0);
      if (i >= k) continue;
      for (std::int64_t j = 0; j < n; ++j) *u++ = j < i ? T(0) : row[j * from.col_stride];
    }
  }
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_cholesky_inverse(AtenTensorHandle self, std::int32_t upper, AtenTensorHandle* ret0) {
  constexpr const char* op = "cholesky_inverse";
  return guarded(op, [&] {
    const Tensor& factor = cpu_input(self, op, "self");
    check_square(op, "self", factor);
    const DimSpan batch = batch_of(factor);
    const std::int64_t n = factor.size(-1), count = checked_numel(batch);
    TensorPtr out = empty_by_columns(batch, n, n, factor.dtype());
    dispatch_lapack(op, "self", factor.dtype(), [&]<class T>() {
      for_each_matrix(count, volume(n, n, n), [&](std::int64_t item, bool serial) {
        const MatrixRef<const T> matrix = item_of<T>(factor, batch, item);
        for (std::int64_t i = 0; i < n; ++i) {
          if (matrix.data[i * (matrix.row_stride + matrix.col_stride)] != T(0)) continue;
          throw_error(ErrorKind::kModel, op, ": matrix ", item, " of the batch is singular: diagonal element ", i + 1,
                      " of its factor is zero");
        }
        T* x = out->data<T>() + item * n * n;
        std::fill_n(x, n * n, T(0));
        for (std::int64_t i = 0; i < n; ++i) x[i * (n + 1)] = T(1);
        solve_cholesky<T>(n, n, matrix, upper != 0, x, serial);
        make_hermitian(n, x);
      });
    });
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu_cholesky_solve(AtenTensorHandle self, AtenTensorHandle input2, std::int32_t upper,
                                           AtenTensorHandle* ret0) {
  constexpr const char* op = "cholesky_solve";
  return guarded(op, [&] {
    const Tensor& b = cpu_input(self, op, "self");
    const Tensor& factor = cpu_input(input2, op, "input2");
    check_matrix(op, "self", b);
    check_square(op, "input2", factor);
    check_same_dtype(op, "input2", factor, b.dtype());
    check(b.size(-2) == factor.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ",
          factor.size(-1), " rows, as 'input2' has");
    const Dims batch = common_batch(op, "self", b, "input2", factor);
    const std::int64_t n = b.size(-2), columns = b.size(-1), count = checked_numel(batch);
    dispatch_lapack(op, "self", b.dtype(), [&]<class T>() {
      TensorPtr out = copy_by_columns(b, batch);
      for_each_matrix(count, 2 * volume(n, n, columns), [&](std::int64_t item, bool serial) {
        solve_cholesky<T>(n, columns, item_of<T>(factor, batch, item), upper != 0, out->data<T>() + item * n * columns,
                          serial);
      });
      give(ret0, std::move(out), op);
    });
  });
}

UNTORCH_SHIM aoti_torch_cpu_triangular_solve(AtenTensorHandle self, AtenTensorHandle A, std::int32_t upper,
                                             std::int32_t transpose, std::int32_t unitriangular, AtenTensorHandle* ret0,
                                             AtenTensorHandle* ret1) {
  constexpr const char* op = "triangular_solve";
  return guarded(op, [&] {
    const Tensor& b = cpu_input(self, op, "self");
    const Tensor& a = cpu_input(A, op, "A");
    check_matrix(op, "self", b);
    check_square(op, "A", a);
    check_same_dtype(op, "A", a, b.dtype());
    check(b.size(-2) == a.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ", a.size(-1),
          " rows, as 'A' has");
    const Dims batch = common_batch(op, "self", b, "A", a);
    const std::int64_t n = b.size(-2), columns = b.size(-1), count = checked_numel(batch);
    dispatch_lapack(op, "self", b.dtype(), [&]<class T>() {
      TensorPtr out = copy_by_columns(b, batch), coefficient = copy_by_columns(a, batch);
      const bool flip = transpose != 0;
      const Triangle triangle{(upper != 0) != flip, unitriangular != 0, false};
      for_each_matrix(count, volume(n, n, columns), [&](std::int64_t item, bool serial) {
        const T* matrix = coefficient->data<T>() + item * n * n;
        kernels::solve_triangular<T>(n, columns, {matrix, flip ? n : 1, flip ? 1 : n}, triangle,
                                     out->data<T>() + item * n * columns, n, serial);
      });
      give(ret0, std::move(out), op);
      give(ret1, std::move(coefficient), op);
    });
  });
}

UNTORCH_SHIM aoti_torch_cpu_geqrf(AtenTensorHandle self, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  constexpr const char* op = "geqrf";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(self, op, "self");
    check_matrix(op, "self", a);
    const DimSpan batch = batch_of(a);
    const std::int64_t m = a.size(-2), n = a.size(-1), k = std::min(m, n), count = checked_numel(batch);
    dispatch_lapack(op, "self", a.dtype(), [&]<class T>() {
      TensorPtr factors = copy_by_columns(a, batch);
      Dims sizes(DimSpan(a.sizes()).first(a.sizes().size() - 1));
      sizes[sizes.size() - 1] = k;
      TensorPtr tau = Tensor::empty(sizes, a.dtype());
      for_each_matrix(count, 2 * volume(m, n, k), [&](std::int64_t item, bool serial) {
        kernels::factor_qr<T>(m, n, factors->data<T>() + item * m * n, std::max<std::int64_t>(m, 1),
                              tau->data<T>() + item * k, serial);
      });
      give(ret0, std::move(factors), op);
      give(ret1, std::move(tau), op);
    });
  });
}

UNTORCH_SHIM aoti_torch_cpu_ormqr(AtenTensorHandle self, AtenTensorHandle input2, AtenTensorHandle input3,
                                  std::int32_t left, std::int32_t transpose, AtenTensorHandle* ret0) {
  constexpr const char* op = "ormqr";
  return guarded(op, [&] {
    const Tensor& v = cpu_input(self, op, "self");
    const Tensor& tau = cpu_input(input2, op, "input2");
    const Tensor& other = cpu_input(input3, op, "input3");
    check_ormqr(op, v, tau, other, left != 0);
    const DimSpan batch = batch_of(v);
    const std::int64_t count = checked_numel(batch), reflections = tau.size(-1);
    dispatch_lapack(op, "self", v.dtype(), [&]<class T>() {
      const TensorPtr vectors = copy_by_columns(v, batch), factors = contiguous(tau);
      // From the right: C·Q is (Qᴴ·Cᴴ)ᴴ.
      const TensorPtr target = copy_by_columns(left != 0 ? other : *transposed(other), batch);
      if (left == 0) conjugate_dense<T>(*target);
      const bool adjoint = (transpose != 0) == (left != 0);
      const std::int64_t m = v.size(-2), n = v.size(-1), columns = target->size(-1);
      for_each_matrix(count, 4 * volume(m, columns, reflections), [&](std::int64_t item, bool serial) {
        kernels::apply_reflections<T>(m, columns, reflections, vectors->data<T>() + item * m * n, m,
                                      factors->data<T>() + item * reflections, adjoint,
                                      target->data<T>() + item * m * columns, m, serial);
      });
      if (left == 0) conjugate_dense<T>(*target);
      give(ret0, left != 0 ? std::make_unique<Tensor>(*target) : copy_by_columns(*transposed(*target), batch), op);
    });
  });
}

UNTORCH_SHIM aoti_torch_cpu_lu_unpack(AtenTensorHandle LU_data, AtenTensorHandle LU_pivots, std::int32_t unpack_data,
                                      std::int32_t unpack_pivots, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                      AtenTensorHandle* ret2) {
  constexpr const char* op = "lu_unpack";
  return guarded(op, [&] {
    const Tensor& lu = cpu_input(LU_data, op, "LU_data");
    const Tensor& pivots = cpu_input(LU_pivots, op, "LU_pivots");
    check_matrix(op, "LU_data", lu);
    const DimSpan batch = batch_of(lu);
    const std::int64_t m = lu.size(-2), n = lu.size(-1), k = std::min(m, n);
    dispatch_lapack(op, "LU_data", lu.dtype(), [&]<class T>() {
      const auto result = [&](bool wanted, std::int64_t rows, std::int64_t columns) {
        return Tensor::empty(wanted ? matrices(batch, rows, columns) : Dims{0}, lu.dtype());
      };
      TensorPtr p = result(unpack_pivots != 0, m, m);
      TensorPtr lower = result(unpack_data != 0, m, k), upper = result(unpack_data != 0, k, n);
      if (unpack_pivots != 0) {
        check_same_dtype(op, "LU_pivots", pivots, DType::kInt32);
        Dims expected(DimSpan(lu.sizes()).first(lu.sizes().size() - 1));
        expected[expected.size() - 1] = k;
        check(pivots.sizes() == expected, op, ": argument 'LU_pivots' must have shape ", to_string(expected), ", got ",
              to_string(pivots.sizes()));
        unpack_permutations<T>(op, pivots, *p);
      }
      if (unpack_data != 0) unpack_factors<T>(lu, *lower, *upper);
      give(ret0, std::move(p), op);
      give(ret1, std::move(lower), op);
      give(ret2, std::move(upper), op);
    });
  });
}

}  // namespace untorch::shims
