// GEMM of int8: _int_mm, and _weight_int8pack_mm (W8A16).
#include "shims/gemm_cuda.h"

using namespace untorch;
using namespace untorch::shims;

// The CPU also takes a uint8 'self'.
UNTORCH_OP_AS("_int_mm", _int_mm_out, (AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2), out, self,
              mat2) {
  const Tensor &a = op.input(self, "self"), &b = op.input(mat2, "mat2"), &c = op.input(out, "out");
  check_rank(op, "self", a, 2);
  check_rank(op, "mat2", b, 2);
  check(a.dtype() == DType::kInt8 || (a.dtype() == DType::kUInt8 && !op.on_cuda()), op,
        ": argument 'self' must be int8", op.on_cuda() ? "" : " or uint8", ", got ", dtype_name(a.dtype()));
  check(b.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(b.dtype()));
  check(a.size(1) == b.size(0), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
        to_string(b.sizes()));
  check_out(op, c, DType::kInt32, Dims{a.size(0), b.size(1)});
  run(
      op, {&a, &b, &c},
      [&] {
        kernels::cpu::gemm_int8({.m = a.size(0),
                                 .n = b.size(1),
                                 .k = a.size(1),
                                 .a = a.raw(),
                                 .a_row = a.stride(0),
                                 .a_col = a.stride(1),
                                 .b = b.raw(),
                                 .b_row = b.stride(0),
                                 .b_col = b.stride(1),
                                 .out = c.raw(),
                                 .out_row = c.stride(0),
                                 .out_col = c.stride(1)},
                                a.dtype());
      },
      [&](const auto& on) { int8_gemm_cuda(op, on, a, b, c); });
}

// x [m, k] · int8 weight [n, k]ᵀ, each column times its scale [n].
UNTORCH_OP(_weight_int8pack_mm,
           (AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scales, AtenTensorHandle* ret0), self, mat2,
           scales, ret0) {
  const Tensor &x = op.input(self, "self"), &weight = op.input(mat2, "mat2"), &scale = op.input(scales, "scales");
  check_rank(op, "self", x, 2);
  check_rank(op, "mat2", weight, 2);
  check(is_floating(x.dtype()) && x.dtype() != DType::kFloat64, op,
        ": argument 'self' must be float32, bfloat16 or float16, got ", dtype_name(x.dtype()));
  check(weight.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(weight.dtype()));
  check(weight.size(1) == x.size(1), op, ": the inner sizes differ: 'self' is ", to_string(x.sizes()), ", 'mat2' is ",
        to_string(weight.sizes()), " (rows are output features)");
  check(scale.dim() == 1 && scale.size(0) == weight.size(0) && scale.dtype() == x.dtype(), op,
        ": argument 'scales' must be ", dtype_name(x.dtype()), " of shape [", weight.size(0), "], got ",
        dtype_name(scale.dtype()), " of shape ", to_string(scale.sizes()));
  op.check_same_device({&x, &weight, &scale});
  const Dims sizes{x.size(0), weight.size(0)};
  TensorPtr out = Tensor::empty(sizes, x.dtype(), x.device());
  if (out->numel() != 0) {
    run(
        op, {&x, &weight, &scale},
        [&] {
          const TensorPtr wide = to_dtype(x, DType::kFloat32), values = to_dtype(weight, DType::kFloat32);
          const TensorPtr factors = to_dtype(scale, DType::kFloat32), sums = Tensor::empty(sizes, DType::kFloat32);
          kernels::cpu::gemm(matrix_of(*wide), matrix_of(*values).transposed(), matrix_of(*sums), 1.0, 0.0);
          kernels::cpu::scale_columns(sizes[0], sizes[1], factors->data<float>(), sums->data<float>());
          copy(*out, *sums);
        },
        [&](const auto& on) {
          w8a16_gemm_cuda(op, on, *contiguous(x), *contiguous(weight), *contiguous(scale), *out);
        });
  }
  give(ret0, std::move(out), op);
}
