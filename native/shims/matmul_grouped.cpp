// _grouped_mm and moe_grouped_mm: GEMM over groups of rows, columns or parts of k (mixture of experts).
#include <cstring>

#include "cuda/tf32.h"
#include "shims/gemm.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

kernels::GroupedGemm grouped_problem(const GroupedShape& shape, const Tensor& a, const Tensor& b, const Tensor& ends,
                                     const Tensor& out) {
  kernels::GroupedGemm p;
  p.dtype = a.dtype();
  p.groups = shape.groups;
  p.ends = ends.raw(), p.ends_stride = ends.stride(0);
  p.out = out.raw();
  p.k = shape.k;
  if (a.dim() == 3) {
    // Groups of columns are groups of rows of the transposed GEMM.
    p.m = shape.n, p.n = shape.m;
    p.a = b.raw(), p.a_row = b.stride(1), p.a_col = b.stride(0);
    p.b = a.raw(), p.b_group = a.stride(0), p.b_row = a.stride(2), p.b_col = a.stride(1);
    p.out_row = out.stride(1), p.out_col = out.stride(0);
  } else {
    p.m = shape.m, p.n = shape.n;
    p.along_k = b.dim() == 2;
    p.a = a.raw(), p.a_row = a.stride(0), p.a_col = a.stride(1);
    p.b = b.raw(), p.b_row = b.stride(-2), p.b_col = b.stride(-1);
    p.b_group = p.along_k ? 0 : b.stride(0);
    p.out_group = p.along_k ? out.stride(0) : 0;
    p.out_row = out.stride(-2), p.out_col = out.stride(-1);
  }
  return p;
}

void check_dtype(const Op& op, const char* argument, DType dtype) {
  const bool served = dtype == DType::kBFloat16 || dtype == DType::kFloat16 || dtype == DType::kFloat32;
  if (served) return;
  throw_error(ErrorKind::kUnsupported, op, ": argument '", argument, "' must be float32, bfloat16 or float16, got ",
              dtype_name(dtype));
}

// The CPU checks the values of `offs`. CUDA's kernel reads them on the device, so that the host never waits.
void run_grouped(const Op& op, const GroupedShape& shape, const Tensor& a, const Tensor& b, const Tensor& ends,
                 Tensor& out) {
  kernels::GroupedGemm problem = grouped_problem(shape, a, b, ends, out);
  run(
      op, {&a, &b, &ends},
      [&] {
        const std::int64_t wrong = kernels::cpu::gemm_grouped(problem);
        if (wrong < 0) return;
        throw_error(ErrorKind::kInvalidArgument, op, ": 'offs' must not decrease and stay within ",
                    problem.along_k ? problem.k : problem.m, ", got ",
                    ends.data<std::int32_t>()[wrong * ends.stride(0)], " at ", wrong);
      },
      [&](const auto& on) {
        problem.num_sms = on.properties().num_sms;
        problem.has_wgmma = on.properties().major == 9 && on.properties().minor == 0;
        problem.has_pdl = on.properties().has_pdl;
        problem.allow_tf32 = cuda::tf32().matmul;
        return kernels::cuda::gemm_grouped(problem, on.stream());
      });
}

}  // namespace

UNTORCH_OP(_grouped_mm,
           (AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs, AtenTensorHandle* bias,
            std::int32_t* out_dtype, AtenTensorHandle* ret0),
           self, mat2, offs, bias, out_dtype, ret0) {
  const Tensor &a = op.input(self, "self"), &b = op.input(mat2, "mat2");
  const Tensor* const ends = op.optional_input(offs, "offs");
  const DType dtype = a.dtype();
  check_dtype(op, "self", dtype);
  const GroupedShape shape =
      check_grouped(op, a, b, ends, op.optional_input(bias, "bias") != nullptr, dtype_or(out_dtype, dtype));
  op.check_same_device({&a, &b, ends});
  TensorPtr out = Tensor::empty_strided(shape.out_sizes, shape.out_strides, dtype, a.device());
  if (ends == nullptr) {
    gemm(op, *out, a, b);
  } else {
    run_grouped(op, shape, a, b, *ends, *out);
  }
  give(ret0, std::move(out), op);
}

// src/untorch/ops/moe_grouped_mm.py: groups of rows; a contiguous result.
UNTORCH_OP(moe_grouped_mm,
           (AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle offs, AtenTensorHandle* ret0), input,
           weight, offs, ret0) {
  const Tensor &x = op.input(input, "input"), &w = op.input(weight, "weight"), &ends = op.input(offs, "offs");
  check_dtype(op, "input", x.dtype());
  check(x.dim() == 2 && w.dim() == 3 && w.size(1) == x.size(1) && w.dtype() == x.dtype(), op,
        ": 'input' must be [tokens, K] and 'weight' [experts, K, N] of its dtype, got ", dtype_name(x.dtype()), " ",
        to_string(x.sizes()), " and ", dtype_name(w.dtype()), " ", to_string(w.sizes()));
  const GroupedShape shape = check_grouped(op, x, w, &ends, false, x.dtype());
  op.check_same_device({&x, &w, &ends});
  TensorPtr out = Tensor::empty(shape.out_sizes, x.dtype(), x.device());
  run_grouped(op, shape, x, w, ends, *out);
  give(ret0, std::move(out), op);
}
