// Products over groups of rows, columns or inner pieces on GPUs (mixture of experts). The ends of the groups are read
// by the kernel: the host never waits for them.
#include "kernels/cuda/gemm/grouped.h"
#include "shims/cuda/matmul.h"

namespace untorch::shims {

UNTORCH_SHIM aoti_torch_cuda__grouped_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs,
                                         AtenTensorHandle* bias, std::int32_t* out_dtype, AtenTensorHandle* ret0) {
  constexpr const char* op = "_grouped_mm";
  return guarded(op, [&] {
    const Tensor& a = cuda_input(self, op, "self");
    const Tensor& b = cuda_input(mat2, op, "mat2");
    const Tensor* const ends = optional_cuda_input(offs, op, "offs");
    const DType dtype = a.dtype();
    if (dtype != DType::kBFloat16 && dtype != DType::kFloat16) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'self' must be bfloat16 or float16 on a GPU, got ",
                  dtype_name(dtype));
    }
    const GroupedShape s =
        check_grouped(op, a, b, ends, optional_cuda_input(bias, op, "bias") != nullptr, dtype_or(out_dtype, dtype));
    for (const Tensor* const other : {&b, ends}) {
      check(other == nullptr || other->device() == a.device(), op, ": operands are on ", device_name(a.device()),
            " and ", other == nullptr ? "" : device_name(other->device()), ", expected one device");
    }
    const OnDevice on(op, a);
    TensorPtr out = Tensor::empty_strided(s.out_sizes, s.out_strides, dtype, a.device());
    if (ends == nullptr) {
      multiply(op, on, {.a = cuda_matrix(a), .b = cuda_matrix(b), .out = cuda_matrix(*out)});
      give(ret0, std::move(out), op);
      return;
    }
    kernels::cuda::GroupedGemm call;
    call.dtype = dtype;
    call.groups = s.groups;
    call.ends = ends->raw(), call.ends_stride = ends->stride(0);
    call.out = out->raw();
    call.k = s.k;
    if (a.dim() == 3) {
      // Groups of columns are groups of rows of the transposed product.
      call.m = s.n, call.n = s.m;
      call.a = b.raw(), call.a_row = b.stride(1), call.a_col = b.stride(0);
      call.b = a.raw(), call.b_group = a.stride(0), call.b_row = a.stride(2), call.b_col = a.stride(1);
      call.out_row = out->stride(1), call.out_col = out->stride(0);
    } else {
      call.m = s.m, call.n = s.n;
      call.along_k = b.dim() == 2;
      call.a = a.raw(), call.a_row = a.stride(0), call.a_col = a.stride(1);
      call.b = b.raw(), call.b_row = b.stride(-2), call.b_col = b.stride(-1);
      call.b_group = call.along_k ? 0 : b.stride(0);
      call.out_group = call.along_k ? out->stride(0) : 0;
      call.out_row = out->stride(-2), call.out_col = out->stride(-1);
    }
    if (!call.along_k) {
      // Rows or columns behind the last group would be left unwritten.
      device_table(DeviceType::kCUDA).zero(out->storage()->data(), out->storage()->nbytes(), out->device());
    }
    on.launched(kernels::cuda::gemm_grouped(call, on.stream()));
    give(ret0, std::move(out), op);
  });
}

}  // namespace untorch::shims
