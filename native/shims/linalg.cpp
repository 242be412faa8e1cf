// LAPACK's operators on any device: Cholesky solves and inverses, LU unpacking, QR factors, triangular systems.
//
// Matrix results are stored by columns, as eager PyTorch's are, lu_unpack's excepted. On CUDA cuBLAS and cuSOLVER
// compute; nothing reads back from the GPU, so a singular factor gives infinities and NaN instead of an error.
#include "kernels/linalg.h"

#include <algorithm>

#include "cuda/solver.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;
using cuda::TriangularSystem;

namespace {

void check_matrix(const char* op, const char* argument, const Tensor& tensor) {
  check(tensor.dim() >= 2, op, ": argument '", argument, "' must have at least 2 dimensions, got shape ",
        to_string(tensor.sizes()));
}

void check_square(const char* op, const char* argument, const Tensor& tensor) {
  check_matrix(op, argument, tensor);
  check(tensor.size(-1) == tensor.size(-2), op, ": argument '", argument,
        "' must be a batch of square matrices, got shape ", to_string(tensor.sizes()));
}

void check_same_dtype(const char* op, const char* argument, const Tensor& tensor, DType dtype) {
  check(tensor.dtype() == dtype, op, ": argument '", argument, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
}

DimSpan batch_of(const Tensor& tensor) { return DimSpan(tensor.sizes()).first(tensor.sizes().size() - 2); }

// The batch that two batches of matrices broadcast to.
Dims common_batch(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  const DimSpan left = batch_of(a), right = batch_of(b);
  Dims batch;
  batch.resize(std::max(left.size(), right.size()));
  for (std::size_t d = 0; d < batch.size(); ++d) {  // from the end
    const std::int64_t x = d < left.size() ? left[left.size() - 1 - d] : 1;
    const std::int64_t y = d < right.size() ? right[right.size() - 1 - d] : 1;
    check(x == y || x == 1 || y == 1, op, ": the batches of '", a_name, "' of shape ", to_string(a.sizes()), " and '",
          b_name, "' of shape ", to_string(b.sizes()), " do not broadcast");
    batch[batch.size() - 1 - d] = x == 1 ? y : x;
  }
  return batch;
}

Dims matrices(DimSpan batch, std::int64_t rows, std::int64_t columns) {
  Dims sizes;
  sizes.resize(batch.size() + 2);
  std::copy(batch.begin(), batch.end(), sizes.begin());
  sizes[batch.size()] = rows;
  sizes[batch.size() + 1] = columns;
  return sizes;
}

// Uninitialised, every matrix stored by columns.
TensorPtr empty_by_columns(DimSpan batch, std::int64_t rows, std::int64_t columns, DType dtype, Device device) {
  Dims strides = contiguous_strides(matrices(batch, columns, rows));
  std::swap(strides[batch.size()], strides[batch.size() + 1]);
  return Tensor::empty_strided(matrices(batch, rows, columns), strides, dtype, device);
}

// A copy that broadcasts to the batch, every matrix stored by columns.
TensorPtr copy_by_columns(const Tensor& from, DimSpan batch) {
  TensorPtr out = empty_by_columns(batch, from.size(-2), from.size(-1), from.dtype(), from.device());
  copy(*out, from);
  return out;
}

// Swaps the two last dimensions, a view.
TensorPtr transposed(const Tensor& tensor) {
  auto out = std::make_unique<Tensor>(tensor);
  const auto last = static_cast<std::size_t>(tensor.dim()) - 1;
  std::swap(out->mutable_sizes()[last], out->mutable_sizes()[last - 1]);
  std::swap(out->mutable_strides()[last], out->mutable_strides()[last - 1]);
  return out;
}

void check_ormqr(const char* op, const Tensor& v, const Tensor& tau, const Tensor& other, bool left) {
  check_matrix(op, "self", v);
  check_matrix(op, "input3", other);
  check(tau.dim() == v.dim() - 1, op, ": argument 'input2' must have one dimension less than 'self', got shapes ",
        to_string(tau.sizes()), " and ", to_string(v.sizes()));
  check(other.dim() == v.dim(), op, ": argument 'input3' must have as many dimensions as 'self', got shapes ",
        to_string(other.sizes()), " and ", to_string(v.sizes()));
  check_same_dtype(op, "input2", tau, v.dtype());
  check_same_dtype(op, "input3", other, v.dtype());
  const std::int64_t rows = other.size(left ? -2 : -1);
  check(rows == v.size(-2), op, ": argument 'input3' of shape ", to_string(other.sizes()), " must have ", v.size(-2),
        left ? " rows" : " columns", ", as many as 'self' has rows");
  check(tau.size(-1) <= std::min(v.size(-2), v.size(-1)), op, ": argument 'input2' of shape ", to_string(tau.sizes()),
        " has more factors than 'self' of shape ", to_string(v.sizes()), " has reflections");
  const bool same_batch = std::ranges::equal(batch_of(v), batch_of(other)) &&
                          std::ranges::equal(batch_of(v), DimSpan(tau.sizes()).first(tau.sizes().size() - 1));
  check(same_batch, op, ": the batches of 'self', 'input2' and 'input3' differ: shapes ", to_string(v.sizes()), ", ",
        to_string(tau.sizes()), " and ", to_string(other.sizes()));
}

void check_lapack(const char* op, const char* argument, DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kComplex64:
    case DType::kComplex128:
      return;
    default:
      throw_error(ErrorKind::kUnsupported, op, ": argument '", argument,
                  "' must be float32, float64, complex64 or complex128, got ", dtype_name(dtype),
                  "; convert it in the model");
  }
}

// The matrices of a tensor that broadcasts to the batch, as they lie.
kernels::MatrixBatch strided_matrices(const Op& op, const Tensor& tensor, DimSpan batch) {
  kernels::MatrixBatch out{tensor.raw(), tensor.stride(-2), tensor.stride(-1), {}};
  const Dims order = contiguous_strides(batch);
  Dims strides;
  strides.resize(batch.size());
  const DimSpan own = batch_of(tensor);
  const std::size_t lead = batch.size() - own.size();
  for (std::size_t d = 0; d < own.size(); ++d) strides[lead + d] = own[d] == 1 ? 0 : tensor.strides()[d];
  check(make_strided<2>(batch, {order, strides}, out.batch), op, ": batch ", to_string(batch),
        " has more dimensions than the kernels take (", kMaxDims, " after merging)");
  return out;
}

// Where every A [n, n] and every B [n, columns] begins, for batched calls; none where they are not made.
template <class On>
StorageRef pointers_to(const On& on, std::int64_t count, std::int64_t n, std::int64_t columns, const Tensor& a,
                       const Tensor& b) {
  if (!cuda::solves_in_batches(count, n)) return {};
  StorageRef pointers = on.scratch(2 * static_cast<std::size_t>(count) * sizeof(void*));
  const auto bytes = static_cast<std::int64_t>(element_size(a.dtype()));
  auto* const to = static_cast<const void**>(pointers->data());
  on.launched(kernels::cuda::fill_pointers(count, a.raw(), n * n * bytes, to, on.stream()));
  on.launched(kernels::cuda::fill_pointers(count, b.raw(), n * columns * bytes, to + count, on.stream()));
  return pointers;
}

template <class On>
void solve(const On& on, const char* op, std::int64_t count, std::int64_t n, std::int64_t columns,
           const TriangularSystem& system, const Tensor& a, const Tensor& b, const StorageRef& pointers) {
  cuda::solve_triangular(op, a.dtype(), count, n, columns, system, a.raw(), b.raw(),
                         pointers ? static_cast<const void* const*>(pointers->data()) : nullptr, on.index(),
                         on.stream());
}

// B := A⁻¹·B for A = L·Lᴴ or Uᴴ·U, of which `factor` holds L or U.
template <class On>
void solve_cholesky(const On& on, const char* op, std::int64_t count, std::int64_t n, std::int64_t columns, bool upper,
                    const Tensor& factor, const Tensor& b) {
  const TriangularSystem plain{upper, false, false, false}, adjoint{upper, true, true, false};
  const StorageRef pointers = pointers_to(on, count, n, columns, factor, b);
  solve(on, op, count, n, columns, upper ? adjoint : plain, factor, b, pointers);
  solve(on, op, count, n, columns, upper ? plain : adjoint, factor, b, pointers);
}

// [batch…, k]: the shape of the factors of k reflections, or of k pivots, of the matrices.
Dims vectors_of(const Tensor& matrices, std::int64_t k) {
  Dims sizes(DimSpan(matrices.sizes()).first(matrices.sizes().size() - 1));
  sizes[sizes.size() - 1] = k;
  return sizes;
}

}  // namespace

UNTORCH_OP(cholesky_inverse, (AtenTensorHandle self, std::int32_t upper, AtenTensorHandle* ret0), self, upper, ret0) {
  const Tensor& input = op.input(self, "self");
  check_square(op, "self", input);
  check_lapack(op, "self", input.dtype());
  const DimSpan batch = batch_of(input);
  const std::int64_t n = input.size(-1), count = checked_numel(batch);
  const DType dtype = input.dtype();
  TensorPtr out = empty_by_columns(batch, n, n, dtype, input.device());
  run(
      op, {&input},
      [&] { kernels::cpu::cholesky_inverse(strided_matrices(op, input, batch), n, upper != 0, dtype, out->raw()); },
      [&](const auto& on) {
        if (out->numel() == 0) return;
        const TensorPtr factor = copy_by_columns(input, batch);
        on.launched(kernels::cuda::unit_matrices(count, n, dtype, out->raw(), on.stream()));
        solve_cholesky(on, op, count, n, n, upper != 0, *factor, *out);
        on.launched(kernels::cuda::make_hermitian(count, n, dtype, out->raw(), on.stream()));
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(cholesky_solve, (AtenTensorHandle self, AtenTensorHandle input2, std::int32_t upper, AtenTensorHandle* ret0),
           self, input2, upper, ret0) {
  const Tensor &b = op.input(self, "self"), &factor = op.input(input2, "input2");
  check_matrix(op, "self", b);
  check_square(op, "input2", factor);
  check_same_dtype(op, "input2", factor, b.dtype());
  check_lapack(op, "self", b.dtype());
  check(b.size(-2) == factor.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ",
        factor.size(-1), " rows, as 'input2' has");
  const Dims batch = common_batch(op, "self", b, "input2", factor);
  const std::int64_t n = b.size(-2), columns = b.size(-1), count = checked_numel(batch);
  TensorPtr out;
  run(
      op, {&b, &factor},
      [&] {
        out = copy_by_columns(b, batch);
        kernels::cpu::cholesky_solve(strided_matrices(op, factor, batch), n, columns, upper != 0, b.dtype(),
                                     out->raw());
      },
      [&](const auto& on) {
        out = copy_by_columns(b, batch);
        if (out->numel() == 0) return;
        solve_cholesky(on, op, count, n, columns, upper != 0, *copy_by_columns(factor, batch), *out);
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(triangular_solve,
           (AtenTensorHandle self, AtenTensorHandle A, std::int32_t upper, std::int32_t transpose,
            std::int32_t unitriangular, AtenTensorHandle* ret0, AtenTensorHandle* ret1),
           self, A, upper, transpose, unitriangular, ret0, ret1) {
  const Tensor &b = op.input(self, "self"), &a = op.input(A, "A");
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  check_matrix(op, "self", b);
  check_square(op, "A", a);
  check_same_dtype(op, "A", a, b.dtype());
  check_lapack(op, "self", b.dtype());
  check(b.size(-2) == a.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ", a.size(-1),
        " rows, as 'A' has");
  const Dims batch = common_batch(op, "self", b, "A", a);
  const std::int64_t n = b.size(-2), columns = b.size(-1), count = checked_numel(batch);
  TensorPtr out, coefficient;
  const auto copy_operands = [&] { out = copy_by_columns(b, batch), coefficient = copy_by_columns(a, batch); };
  run(
      op, {&b, &a},
      [&] {
        copy_operands();
        kernels::cpu::triangular_solve(count, n, columns, upper != 0, transpose != 0, unitriangular != 0, b.dtype(),
                                       coefficient->raw(), out->raw());
      },
      [&](const auto& on) {
        copy_operands();
        if (out->numel() == 0) return;
        solve(on, op, count, n, columns, {upper != 0, transpose != 0, false, unitriangular != 0}, *coefficient, *out,
              pointers_to(on, count, n, columns, *coefficient, *out));
      });
  give(ret0, std::move(out), op);
  give(ret1, std::move(coefficient), op);
}

UNTORCH_OP(geqrf, (AtenTensorHandle self, AtenTensorHandle* ret0, AtenTensorHandle* ret1), self, ret0, ret1) {
  const Tensor& a = op.input(self, "self");
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  check_matrix(op, "self", a);
  check_lapack(op, "self", a.dtype());
  const DimSpan batch = batch_of(a);
  const std::int64_t m = a.size(-2), n = a.size(-1), count = checked_numel(batch);
  TensorPtr factors = copy_by_columns(a, batch);
  TensorPtr tau = Tensor::empty(vectors_of(a, std::min(m, n)), a.dtype(), a.device());
  run(
      op, {&a}, [&] { kernels::cpu::geqrf(count, m, n, a.dtype(), factors->raw(), tau->raw()); },
      [&](const auto& on) {
        cuda::factor_qr(op, a.dtype(), count, m, n, factors->raw(), tau->raw(), on.index(), on.stream());
      });
  give(ret0, std::move(factors), op);
  give(ret1, std::move(tau), op);
}

UNTORCH_OP(ormqr,
           (AtenTensorHandle self, AtenTensorHandle input2, AtenTensorHandle input3, std::int32_t left,
            std::int32_t transpose, AtenTensorHandle* ret0),
           self, input2, input3, left, transpose, ret0) {
  const Tensor &v = op.input(self, "self"), &tau = op.input(input2, "input2"), &other = op.input(input3, "input3");
  check_ormqr(op, v, tau, other, left != 0);
  check_lapack(op, "self", v.dtype());
  const DimSpan batch = batch_of(v);
  const std::int64_t count = checked_numel(batch), reflections = tau.size(-1);
  TensorPtr out;
  run(
      op, {&v, &tau, &other},
      [&] {
        const TensorPtr vectors = copy_by_columns(v, batch), factors = contiguous(tau);
        // From the right: C·Q is (Qᴴ·Cᴴ)ᴴ.
        out = copy_by_columns(left != 0 ? other : *transposed(other), batch);
        kernels::cpu::ormqr(count, v.size(-2), v.size(-1), out->size(-1), reflections, (transpose != 0) == (left != 0),
                            left == 0, v.dtype(), vectors->raw(), factors->raw(), out->raw());
        if (left == 0) out = copy_by_columns(*transposed(*out), batch);
      },
      [&](const auto& on) {
        out = copy_by_columns(other, batch);
        const TensorPtr vectors = copy_by_columns(v, batch), factors = contiguous(tau);
        cuda::apply_q(op, v.dtype(), count, other.size(-2), other.size(-1), v.size(-1), reflections, left != 0,
                      transpose != 0, vectors->raw(), factors->raw(), out->raw(), on.index(), on.stream());
      });
  give(ret0, std::move(out), op);
}

UNTORCH_OP(lu_unpack,
           (AtenTensorHandle LU_data, AtenTensorHandle LU_pivots, std::int32_t unpack_data, std::int32_t unpack_pivots,
            AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2),
           LU_data, LU_pivots, unpack_data, unpack_pivots, ret0, ret1, ret2) {
  const Tensor &lu = op.input(LU_data, "LU_data"), &pivots = op.input(LU_pivots, "LU_pivots");
  check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr, op, ": output pointer is null");
  check_matrix(op, "LU_data", lu);
  check_lapack(op, "LU_data", lu.dtype());
  const DimSpan batch = batch_of(lu);
  const std::int64_t m = lu.size(-2), n = lu.size(-1), k = std::min(m, n), count = checked_numel(batch);
  if (unpack_pivots != 0) {
    check_same_dtype(op, "LU_pivots", pivots, DType::kInt32);
    const Dims expected = vectors_of(lu, k);
    check(pivots.sizes() == expected, op, ": argument 'LU_pivots' must have shape ", to_string(expected), ", got ",
          to_string(pivots.sizes()));
  }
  TensorPtr p, lower, upper;
  const auto allocate = [&] {
    const auto result = [&](bool wanted, std::int64_t rows, std::int64_t columns) {
      return Tensor::empty(wanted ? matrices(batch, rows, columns) : Dims{0}, lu.dtype(), lu.device());
    };
    p = result(unpack_pivots != 0, m, m);
    lower = result(unpack_data != 0, m, k), upper = result(unpack_data != 0, k, n);
  };
  run(
      op, {&lu, &pivots},
      [&] {
        allocate();
        if (unpack_pivots != 0) {
          const auto bad = kernels::cpu::unpack_permutations(count, m, k, contiguous(pivots)->data<std::int32_t>(),
                                                             lu.dtype(), p->raw());
          const kernels::BadPivot at = bad.value_or(kernels::BadPivot{});
          check(!bad, op, ": argument 'LU_pivots' must hold rows from 1 to ", m, ", got ", at.row, " at position ",
                at.position, " of matrix ", at.matrix, "; pass the pivots of lu_factor");
        }
        if (unpack_data != 0) {
          kernels::cpu::unpack_factors(strided_matrices(op, lu, batch), m, n, lu.dtype(), lower->raw(), upper->raw());
        }
      },
      [&](const auto& on) {
        allocate();
        if (p->numel() != 0) {
          const TensorPtr swaps = contiguous(pivots);
          const StorageRef order = on.scratch(static_cast<std::size_t>(count * m) * sizeof(std::int64_t));
          on.launched(kernels::cuda::unpack_permutations(count, m, k, swaps->template data<std::int32_t>(),
                                                         static_cast<std::int64_t*>(order->data()), lu.dtype(),
                                                         p->raw(), on.faults(), on.stream()));
        }
        if (unpack_data != 0) {
          const TensorPtr dense = contiguous(lu);
          on.launched(kernels::cuda::unpack_factors(count, m, n, lu.dtype(), dense->raw(), lower->raw(), upper->raw(),
                                                    on.stream()));
        }
      });
  give(ret0, std::move(p), op);
  give(ret1, std::move(lower), op);
  give(ret2, std::move(upper), op);
}
