// Products over groups of rows, columns or inner pieces on the CPU (mixture of experts), and addmm with an activation.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "shims/cpu/matmul.h"

namespace untorch::shims {
namespace {

MatrixView part(const MatrixView& whole, DType dtype, std::int64_t row, std::int64_t rows, std::int64_t col,
                std::int64_t cols) {
  MatrixView out = whole;
  out.data += (row * whole.row_stride + col * whole.col_stride) * static_cast<std::int64_t>(element_size(dtype));
  out.rows = rows, out.cols = cols;
  return out;
}

// Ends of the groups: not decreasing, within [0, total].
void check_offsets(const char* op, const Tensor& offs, std::int64_t total, Dims& ends) {
  ends.resize(static_cast<std::size_t>(offs.size(0)));
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < offs.size(0); ++i) {
    const std::int64_t end = offs.data<std::int32_t>()[i * offs.stride(0)];
    check(end >= before && end <= total, op, ": 'offs' must not decrease and stay within ", total, ", got ", end,
          " at ", i);
    ends[static_cast<std::size_t>(i)] = before = end;
  }
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__grouped_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs,
                                        AtenTensorHandle* bias, std::int32_t* out_dtype, AtenTensorHandle* ret0) {
  constexpr const char* op = "_grouped_mm";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(self, op, "self");
    const Tensor& b = cpu_input(mat2, op, "mat2");
    const Tensor* ends_tensor = optional_cpu_input(offs, op, "offs");
    const DType dtype = a.dtype();
    if (dtype != DType::kFloat32 && dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'self' must be float32, bfloat16 or float16, got ",
                  dtype_name(dtype));
    }
    const GroupedShape shape = check_grouped(op, a, b, ends_tensor, optional_cpu_input(bias, op, "bias") != nullptr,
                                             dtype_or(out_dtype, dtype));
    const bool batched = ends_tensor == nullptr, flat = a.dim() != b.dim();
    const std::int64_t m = shape.m, n = shape.n, k = shape.k, groups = shape.groups;
    TensorPtr out = Tensor::empty_strided(shape.out_sizes, shape.out_strides, dtype);
    if (batched) {
      multiply_batch(op, a, b, *out, 0.0, 1.0);
      give(ret0, std::move(out), op);
      return;
    }
    // Rows and columns behind the last group would be left unwritten.
    std::memset(out->storage()->data(), 0, out->storage()->nbytes());
    Dims ends;
    check_offsets(op, *ends_tensor, !flat ? k : a.dim() == 2 ? m : n, ends);
    std::int64_t start = 0;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t end = ends[static_cast<std::size_t>(g)], length = end - start;
      if (!flat) {
        multiply(op, dtype, part(matrix_of(a), dtype, 0, m, start, length),
                 part(matrix_of(b), dtype, start, length, 0, n), matrix_of(*out, g), 0.0, 1.0);
      } else if (a.dim() == 2) {
        multiply(op, dtype, part(matrix_of(a), dtype, start, length, 0, k), matrix_of(b, g),
                 part(matrix_of(*out), dtype, start, length, 0, n), 0.0, 1.0);
      } else {
        multiply(op, dtype, matrix_of(a, g), part(matrix_of(b), dtype, 0, k, start, length),
                 part(matrix_of(*out), dtype, 0, m, start, length), 0.0, 1.0);
      }
      start = end;
    }
    give(ret0, std::move(out), op);
  });
}

// relu or (exact) gelu of beta·self + alpha·mat1·mat2, as PyTorch's CPU does it.
UNTORCH_SHIM aoti_torch_cpu__addmm_activation(AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2,
                                              double beta, double alpha, std::int32_t use_gelu,
                                              AtenTensorHandle* ret0) {
  constexpr const char* op = "_addmm_activation";
  return guarded(op, [&] {
    const Tensor& added = cpu_input(self, op, "self");
    const Tensor& a = cpu_input(mat1, op, "mat1");
    const Tensor& b = cpu_input(mat2, op, "mat2");
    const DType dtype = a.dtype();
    check_rank(op, "mat1", a, 2);
    check_rank(op, "mat2", b, 2);
    check_product(op, "mat1", a, "mat2", b);
    if (!is_floating(dtype)) {
      throw_error(ErrorKind::kUnsupported, op, ": operands must be float32, float64, bfloat16 or float16, got ",
                  dtype_name(dtype));
    }
    TensorPtr out = Tensor::empty(Dims{a.size(0), b.size(1)}, dtype);
    if (beta != 0.0) seed_out(op, *out, added);
    multiply(op, dtype, matrix_of(a), matrix_of(b), matrix_of(*out), beta, alpha);
    if (dtype == DType::kFloat64) {
      double* const x = out->data<double>();
      for (std::int64_t i = 0; i < out->numel(); ++i) {
        x[i] = use_gelu != 0 ? 0.5 * x[i] * (1.0 + std::erf(x[i] * 0.70710678118654752440)) : x[i] < 0.0 ? 0.0 : x[i];
      }
      give(ret0, std::move(out), op);
      return;
    }
    const TensorPtr wide = to_dtype(*out, DType::kFloat32);
    kernels::apply_activation(out->size(0), out->size(1),
                              use_gelu != 0 ? kernels::Activation::kGelu : kernels::Activation::kRelu,
                              wide->data<float>(), out->size(1));
    give(ret0, to_dtype(*wide, dtype), op);
  });
}

}  // namespace untorch::shims
