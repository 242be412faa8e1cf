// The arguments of LAPACK's operators, as PyTorch checks them, and matrices stored by columns.
#include "shims/linalg.h"

#include <algorithm>

#include "tensor/device.h"

namespace untorch::shims {

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

}  // namespace untorch::shims
