// GEMM on either device, as the operators over it take it.
#include "shims/gemm.h"

#include "shims/gemm_cuda.h"

namespace untorch::shims {
namespace {

// Writes `added`, broadcast, to `out`, unless they are the same view.
void seed(const Tensor& out, const Tensor& added) {
  const bool same = added.raw() == out.raw() && added.sizes() == out.sizes() && added.strides() == out.strides();
  if (!same) copy(out, added);
}

}  // namespace

kernels::Matrix matrix_of(const Tensor& tensor) {
  const bool batched = tensor.dim() == 3;
  return {tensor.raw(),      tensor.dtype(),    batched ? tensor.size(0) : 1,
          tensor.size(-2),   tensor.size(-1),   batched ? tensor.stride(0) : 0,
          tensor.stride(-2), tensor.stride(-1), tensor.storage()->read_only()};
}

void check_gemm_dtype(const Op& op, DType dtype) {
  if (op.on_cuda() ? is_floating(dtype) : kernels::cpu::has_gemm(dtype)) return;
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported",
              op.on_cuda() ? " on a GPU, expected float32, bfloat16, float16 or float64"
                           : ", expected a floating, signed integer, uint8 or complex dtype",
              "; convert the operands");
}

void gemm(const Op& op, const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* added, double alpha,
          double beta) {
  run(
      op, {&a, &b, &out, added},
      [&] {
        if (added != nullptr && beta != 0.0) seed(out, *added);
        kernels::cpu::gemm(matrix_of(a), matrix_of(b), matrix_of(out), alpha, added == nullptr ? 0.0 : beta);
      },
      [&](const auto& on) { gemm_cuda(op, on, gemm_problem(out, a, b, added, alpha, beta)); });
}

bool is_float8(DType dtype) noexcept { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }

}  // namespace untorch::shims
