// The contract of GEMM operands, on any device.
#include "shims/matmul_checks.h"

#include <algorithm>

namespace untorch::shims {

void check_rank(const char* op, const char* argument, const Tensor& tensor, std::int64_t dim) {
  check(tensor.dim() == dim, op, ": argument '", argument, "' must be ", dim, "-D, got shape ",
        to_string(tensor.sizes()));
}

void check_gemm_shapes(const char* op, const char* a_name, const Tensor& a, const char* b_name, const Tensor& b) {
  check(a.dtype() == b.dtype(), op, ": '", a_name, "' and '", b_name, "' must have the same dtype, got ",
        dtype_name(a.dtype()), " and ", dtype_name(b.dtype()));
  check(a.size(-1) == b.size(-2), op, ": the inner sizes differ: '", a_name, "' is ", to_string(a.sizes()), ", '",
        b_name, "' is ", to_string(b.sizes()));
  check(a.dim() != 3 || a.size(0) == b.size(0), op, ": the batch sizes differ: '", a_name, "' is ",
        to_string(a.sizes()), ", '", b_name, "' is ", to_string(b.sizes()));
}

void check_out(const char* op, const Tensor& out, DType dtype, DimSpan sizes) {
  check(out.dtype() == dtype, op, ": argument 'out' must be ", dtype_name(dtype), ", got ", dtype_name(out.dtype()));
  check(std::ranges::equal(DimSpan(out.sizes()), sizes), op, ": argument 'out' must have shape ", to_string(sizes),
        ", got ", to_string(out.sizes()));
}

void check_added(const char* op, const Tensor& self, DType dtype, DimSpan sizes) {
  check(self.dtype() == dtype, op, ": 'self' must have the operands' dtype ", dtype_name(dtype), ", got ",
        dtype_name(self.dtype()));
  const auto dim = static_cast<std::int64_t>(sizes.size());
  bool fits = self.dim() <= dim;
  for (std::int64_t d = 1; fits && d <= self.dim(); ++d) {
    fits = self.size(-d) == sizes[static_cast<std::size_t>(dim - d)] || self.size(-d) == 1;
  }
  check(fits, op, ": 'self' of shape ", to_string(self.sizes()), " does not broadcast to ", to_string(sizes));
}

std::optional<std::int64_t> row_stride_of(const Tensor& x) {
  std::int64_t stride = x.size(-1), extent = 0;  // extent: how far a dimension outside must step
  for (std::int64_t d = x.dim() - 2; d >= 0; --d) {
    if (x.size(d) == 1) continue;
    if (extent == 0) {
      stride = x.stride(d);
    } else if (x.stride(d) != extent) {
      return std::nullopt;
    }
    extent = x.stride(d) * x.size(d);
    if (extent == 0) return std::nullopt;
  }
  return stride;
}

GroupedShape check_grouped(const char* op, const Tensor& a, const Tensor& b, const Tensor* offs, bool has_bias,
                           DType out_dtype) {
  const DType dtype = a.dtype();
  check((a.dim() == 2 || a.dim() == 3) && (b.dim() == 2 || b.dim() == 3), op,
        ": operands must be 2-D or 3-D, got shapes ", to_string(a.sizes()), " and ", to_string(b.sizes()));
  check(dtype == b.dtype(), op, ": 'self' and 'mat2' must have the same dtype, got ", dtype_name(dtype), " and ",
        dtype_name(b.dtype()));
  check(a.size(-1) == b.size(-2), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
        to_string(b.sizes()));
  if (has_bias) {
    throw_error(ErrorKind::kUnsupported, op,
                ": argument 'bias' is not supported (PyTorch has none either); add it after");
  }
  if (out_dtype != dtype) {
    throw_error(ErrorKind::kUnsupported, op, ": out_dtype must be ", dtype_name(dtype), " like 'self', got ",
                dtype_name(out_dtype));
  }
  const bool batched = a.dim() == 3 && b.dim() == 3;
  check(batched == (offs == nullptr), op,
        batched ? ": 'offs' must be absent for two 3-D operands" : ": 'offs' is needed with a 2-D operand");
  check(!batched || a.size(0) == b.size(0), op, ": the group counts differ: 'self' is ", to_string(a.sizes()),
        ", 'mat2' is ", to_string(b.sizes()));
  const std::int64_t m = a.size(-2), n = b.size(-1), k = a.size(-1);
  const std::int64_t groups = a.dim() == 3 ? a.size(0) : b.dim() == 3 ? b.size(0) : offs->numel();
  if (offs != nullptr) {
    check(offs->dtype() == DType::kInt32, op, ": argument 'offs' must be int32, got ", dtype_name(offs->dtype()));
    check_rank(op, "offs", *offs, 1);
    check(offs->size(0) == groups, op, ": argument 'offs' must have ", groups, " entries, got ", offs->size(0));
  }
  const std::int64_t unit = 16 / static_cast<std::int64_t>(element_size(dtype)), row = (n + unit - 1) / unit * unit;
  if (a.dim() != b.dim()) return {groups, m, n, k, Dims{m, n}, Dims{row, 1}};
  return {groups, m, n, k, Dims{groups, m, n}, Dims{m * row, row, 1}};
}

void check_is(const char* op, const char* argument, const Tensor& tensor, DType dtype, const Dims& sizes) {
  check(tensor.dtype() == dtype, op, ": argument '", argument, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
  check(tensor.sizes() == sizes, op, ": argument '", argument, "' must have shape ", to_string(sizes), ", got ",
        to_string(tensor.sizes()));
  check(tensor.is_contiguous(), op, ": argument '", argument, "' must be contiguous, got shape ",
        to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

FloatRows float_rows(const Tensor& x) {
  TensorPtr rows = x.dtype() == DType::kFloat32 ? std::make_unique<Tensor>(x) : to_dtype(x, DType::kFloat32);
  if (const std::optional<std::int64_t> stride = row_stride_of(*rows)) return {std::move(rows), *stride};
  return {clone_contiguous(*rows), x.size(-1)};
}

void check_float_rows(const char* op, const char* argument, const Tensor& x) {
  const bool served = x.dtype() == DType::kFloat32 || x.dtype() == DType::kBFloat16 || x.dtype() == DType::kFloat16;
  check(served, op, ": argument '", argument, "' must be float32, bfloat16 or float16, got ", dtype_name(x.dtype()));
  check(x.dim() >= 1, op, ": argument '", argument, "' must have at least one dimension, got shape ",
        to_string(x.sizes()));
  check(x.size(-1) <= 1 || x.stride(-1) == 1 || x.numel() == 0, op, ": argument '", argument,
        "' must have a contiguous last dimension, got shape ", to_string(x.sizes()), " with strides ",
        to_string(x.strides()));
}

void check_bias(const char* op, const Tensor& bias, std::int64_t n, DType dtype) {
  check(bias.dim() == 1 && bias.size(0) == n, op, ": argument 'bias' must have shape [", n, "], got ",
        to_string(bias.sizes()));
  check(bias.dtype() == dtype, op, ": argument 'bias' must be ", dtype_name(dtype), " like 'x', got ",
        dtype_name(bias.dtype()));
}

std::int64_t rows_before_last(const Tensor& x) {
  std::int64_t rows = 1;
  for (std::int64_t d = 0; d + 1 < x.dim(); ++d) rows *= x.size(d);
  return rows;
}

}  // namespace untorch::shims
