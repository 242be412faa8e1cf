// _grouped_mm: GEMM over groups of rows, columns or parts of k (mixture of experts).
#include <cstring>

#include "shims/gemm.h"
#include "tensor/device.h"

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

}  // namespace

// The CPU checks the values of `offs`. CUDA's kernel reads them on the device, so that the host never waits.
UNTORCH_OP(_grouped_mm,
           (AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs, AtenTensorHandle* bias,
            std::int32_t* out_dtype, AtenTensorHandle* ret0),
           self, mat2, offs, bias, out_dtype, ret0) {
  const Tensor &a = op.input(self, "self"), &b = op.input(mat2, "mat2");
  const Tensor* const ends = op.optional_input(offs, "offs");
  const DType dtype = a.dtype();
  const bool half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
  if (!half && (op.on_cuda() || dtype != DType::kFloat32)) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'self' must be ",
                op.on_cuda() ? "bfloat16 or float16 on a GPU" : "float32, bfloat16 or float16", ", got ",
                dtype_name(dtype));
  }
  const GroupedShape shape =
      check_grouped(op, a, b, ends, op.optional_input(bias, "bias") != nullptr, dtype_or(out_dtype, dtype));
  op.check_same_device({&a, &b, ends});
  TensorPtr out = Tensor::empty_strided(shape.out_sizes, shape.out_strides, dtype, a.device());
  if (ends == nullptr) {
    gemm(op, *out, a, b);
    give(ret0, std::move(out), op);
    return;
  }
  const kernels::GroupedGemm problem = grouped_problem(shape, a, b, *ends, *out);
  run(
      op, {&a, &b, ends},
      [&] {
        // Rows and columns behind the last group would be left unwritten.
        std::memset(out->storage()->data(), 0, out->storage()->nbytes());
        const std::int64_t wrong = kernels::cpu::gemm_grouped(problem);
        if (wrong < 0) return;
        throw_error(ErrorKind::kInvalidArgument, op, ": 'offs' must not decrease and stay within ",
                    problem.along_k ? problem.k : problem.m, ", got ",
                    ends->data<std::int32_t>()[wrong * ends->stride(0)], " at ", wrong);
      },
      [&](const auto& on) {
        if (!problem.along_k) {
          device_table(DeviceType::kCUDA).zero(out->storage()->data(), out->storage()->nbytes(), out->device());
        }
        return kernels::cuda::gemm_grouped(problem, on.stream());
      });
  give(ret0, std::move(out), op);
}
