// Operators of LAPACK on CUDA: Cholesky solves and inverses, LU unpacking, QR factors, triangular systems.
//
// Matrix results are stored by columns, as eager PyTorch's are, lu_unpack's excepted. Nothing reads back from the GPU,
// so a singular factor gives infinities and NaN instead of an error.
#include "shims/linalg.h"

#include "cuda/device_error.h"
#include "cuda/solver.h"
#include "kernels/cuda/linalg/linalg.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;
using cuda::TriangularSystem;

namespace {

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

// Where every A [n, n] and every B [n, columns] begins, for batched calls; none where they are not made.
StorageRef pointers_to(const OnDevice& on, std::int64_t count, std::int64_t n, std::int64_t columns, const Tensor& a,
                       const Tensor& b) {
  if (!cuda::solves_in_batches(count, n)) return {};
  StorageRef pointers = on.scratch(2 * static_cast<std::size_t>(count) * sizeof(void*));
  const auto bytes = static_cast<std::int64_t>(element_size(a.dtype()));
  auto* const to = static_cast<const void**>(pointers->data());
  on.launched(kernels::cuda::fill_pointers(count, a.raw(), n * n * bytes, to, on.stream()));
  on.launched(kernels::cuda::fill_pointers(count, b.raw(), n * columns * bytes, to + count, on.stream()));
  return pointers;
}

void solve(const OnDevice& on, const char* op, std::int64_t count, std::int64_t n, std::int64_t columns,
           const TriangularSystem& system, const Tensor& a, const Tensor& b, const StorageRef& pointers) {
  cuda::solve_triangular(op, a.dtype(), count, n, columns, system, a.raw(), b.raw(),
                         pointers ? static_cast<const void* const*>(pointers->data()) : nullptr, on.index(),
                         on.stream());
}

// B := A⁻¹·B for A = L·Lᴴ or Uᴴ·U, of which `factor` holds L or U.
void solve_cholesky(const OnDevice& on, const char* op, std::int64_t count, std::int64_t n, std::int64_t columns,
                    bool upper, const Tensor& factor, const Tensor& b) {
  const TriangularSystem plain{upper, false, false, false}, adjoint{upper, true, true, false};
  const StorageRef pointers = pointers_to(on, count, n, columns, factor, b);
  solve(on, op, count, n, columns, upper ? adjoint : plain, factor, b, pointers);
  solve(on, op, count, n, columns, upper ? plain : adjoint, factor, b, pointers);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_cholesky_inverse(AtenTensorHandle self, std::int32_t upper, AtenTensorHandle* ret0) {
  constexpr const char* op = "cholesky_inverse";
  return guarded(op, [&] {
    const Tensor& input = cuda_input(self, op, "self");
    check_square(op, "self", input);
    check_lapack(op, "self", input.dtype());
    const DimSpan batch = batch_of(input);
    const std::int64_t n = input.size(-1), count = checked_numel(batch);
    const OnDevice on(op, input);
    TensorPtr out = empty_by_columns(batch, n, n, input.dtype(), input.device());
    if (out->numel() != 0) {
      const TensorPtr factor = copy_by_columns(input, batch);
      on.launched(kernels::cuda::unit_matrices(count, n, input.dtype(), out->raw(), on.stream()));
      solve_cholesky(on, op, count, n, n, upper != 0, *factor, *out);
      on.launched(kernels::cuda::make_hermitian(count, n, input.dtype(), out->raw(), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_cholesky_solve(AtenTensorHandle self, AtenTensorHandle input2, std::int32_t upper,
                                            AtenTensorHandle* ret0) {
  constexpr const char* op = "cholesky_solve";
  return guarded(op, [&] {
    const Tensor &b = cuda_input(self, op, "self"), &factor = cuda_input(input2, op, "input2");
    check_matrix(op, "self", b);
    check_square(op, "input2", factor);
    check_same_dtype(op, "input2", factor, b.dtype());
    check_lapack(op, "self", b.dtype());
    check(b.size(-2) == factor.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ",
          factor.size(-1), " rows, as 'input2' has");
    const Dims batch = common_batch(op, "self", b, "input2", factor);
    const OnDevice on(op, b, {&factor});
    TensorPtr out = copy_by_columns(b, batch);
    if (out->numel() != 0) {
      solve_cholesky(on, op, checked_numel(batch), b.size(-2), b.size(-1), upper != 0, *copy_by_columns(factor, batch),
                     *out);
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_triangular_solve(AtenTensorHandle self, AtenTensorHandle A, std::int32_t upper,
                                              std::int32_t transpose, std::int32_t unitriangular,
                                              AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  constexpr const char* op = "triangular_solve";
  return guarded(op, [&] {
    const Tensor &b = cuda_input(self, op, "self"), &a = cuda_input(A, op, "A");
    check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
    check_matrix(op, "self", b);
    check_square(op, "A", a);
    check_same_dtype(op, "A", a, b.dtype());
    check_lapack(op, "self", b.dtype());
    check(b.size(-2) == a.size(-1), op, ": argument 'self' of shape ", to_string(b.sizes()), " must have ", a.size(-1),
          " rows, as 'A' has");
    const Dims batch = common_batch(op, "self", b, "A", a);
    const OnDevice on(op, b, {&a});
    TensorPtr out = copy_by_columns(b, batch), coefficient = copy_by_columns(a, batch);
    const std::int64_t count = checked_numel(batch), n = b.size(-2), columns = b.size(-1);
    if (out->numel() != 0) {
      solve(on, op, count, n, columns, {upper != 0, transpose != 0, false, unitriangular != 0}, *coefficient, *out,
            pointers_to(on, count, n, columns, *coefficient, *out));
    }
    give(ret0, std::move(out), op);
    give(ret1, std::move(coefficient), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_geqrf(AtenTensorHandle self, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  constexpr const char* op = "geqrf";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(self, op, "self");
    check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
    check_matrix(op, "self", a);
    check_lapack(op, "self", a.dtype());
    const DimSpan batch = batch_of(a);
    const std::int64_t m = a.size(-2), n = a.size(-1);
    Dims sizes(DimSpan(a.sizes()).first(a.sizes().size() - 1));
    sizes[sizes.size() - 1] = std::min(m, n);
    const OnDevice on(op, a);
    TensorPtr factors = copy_by_columns(a, batch), tau = Tensor::empty(sizes, a.dtype(), a.device());
    cuda::factor_qr(op, a.dtype(), checked_numel(batch), m, n, factors->raw(), tau->raw(), on.index(), on.stream());
    give(ret0, std::move(factors), op);
    give(ret1, std::move(tau), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_ormqr(AtenTensorHandle self, AtenTensorHandle input2, AtenTensorHandle input3,
                                   std::int32_t left, std::int32_t transpose, AtenTensorHandle* ret0) {
  constexpr const char* op = "ormqr";
  return guarded(op, [&] {
    const Tensor &v = cuda_input(self, op, "self"), &tau = cuda_input(input2, op, "input2"),
                 &other = cuda_input(input3, op, "input3");
    check_ormqr(op, v, tau, other, left != 0);
    check_lapack(op, "self", v.dtype());
    const DimSpan batch = batch_of(v);
    const OnDevice on(op, v, {&tau, &other});
    TensorPtr out = copy_by_columns(other, batch);
    const TensorPtr vectors = copy_by_columns(v, batch), factors = contiguous(tau);
    cuda::apply_q(op, v.dtype(), checked_numel(batch), other.size(-2), other.size(-1), v.size(-1), tau.size(-1),
                  left != 0, transpose != 0, vectors->raw(), factors->raw(), out->raw(), on.index(), on.stream());
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_lu_unpack(AtenTensorHandle LU_data, AtenTensorHandle LU_pivots, std::int32_t unpack_data,
                                       std::int32_t unpack_pivots, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
                                       AtenTensorHandle* ret2) {
  constexpr const char* op = "lu_unpack";
  return guarded(op, [&] {
    const Tensor &lu = cuda_input(LU_data, op, "LU_data"), &pivots = cuda_input(LU_pivots, op, "LU_pivots");
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr, op, ": output pointer is null");
    check_matrix(op, "LU_data", lu);
    check_lapack(op, "LU_data", lu.dtype());
    const DimSpan batch = batch_of(lu);
    const std::int64_t m = lu.size(-2), n = lu.size(-1), k = std::min(m, n), count = checked_numel(batch);
    if (unpack_pivots != 0) {
      check_same_dtype(op, "LU_pivots", pivots, DType::kInt32);
      Dims expected(DimSpan(lu.sizes()).first(lu.sizes().size() - 1));
      expected[expected.size() - 1] = k;
      check(pivots.sizes() == expected, op, ": argument 'LU_pivots' must have shape ", to_string(expected), ", got ",
            to_string(pivots.sizes()));
    }
    const OnDevice on(op, lu, {&pivots});
    const auto result = [&](bool wanted, std::int64_t rows, std::int64_t columns) {
      return Tensor::empty(wanted ? matrices(batch, rows, columns) : Dims{0}, lu.dtype(), lu.device());
    };
    TensorPtr p = result(unpack_pivots != 0, m, m);
    TensorPtr lower = result(unpack_data != 0, m, k), upper = result(unpack_data != 0, k, n);
    if (p->numel() != 0) {
      const TensorPtr swaps = contiguous(pivots);
      const StorageRef order = on.scratch(static_cast<std::size_t>(count * m) * sizeof(std::int64_t));
      on.launched(kernels::cuda::unpack_permutations(count, m, k, swaps->data<std::int32_t>(),
                                                     static_cast<std::int64_t*>(order->data()), lu.dtype(), p->raw(),
                                                     cuda::DeviceErrors::word(on.index()), on.stream()));
    }
    if (unpack_data != 0) {
      const TensorPtr dense = contiguous(lu);
      on.launched(kernels::cuda::unpack_factors(count, m, n, lu.dtype(), dense->raw(), lower->raw(), upper->raw(),
                                                on.stream()));
    }
    give(ret0, std::move(p), op);
    give(ret1, std::move(lower), op);
    give(ret2, std::move(upper), op);
  });
}
