// _weight_int8pack_mm on CUDA: few rows by a kernel that reads the int8 weights as they are, many by cuBLASLt on the
// weights in the rows' dtype, in which every int8 is exact.
#include "cuda/blas.h"
#include "kernels/cuda/gemm/w8a16_gemv.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr std::int64_t kFewRows = 16;

// The product in float32; null when cuBLASLt has no algorithm for it.
TensorPtr library_product(const OnDevice& on, const char* op, const Tensor& x, const Tensor& weight) {
  const std::int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
  const TensorPtr values = to_dtype(weight, x.dtype());
  TensorPtr product = Tensor::empty(Dims{m, n}, DType::kFloat32, x.device());
  cuda::BlasProduct problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.a = {x.raw(), x.dtype(), false, k, 0};
  problem.b = {values->raw(), x.dtype(), true, k, 0};
  problem.d = product->raw();
  problem.d_dtype = DType::kFloat32;
  problem.ldd = n;
  return cuda::blas_multiply(op, problem, on.index(), on.stream()) ? std::move(product) : nullptr;
}

}  // namespace

// x [m, k] · int8 weight [n, k]ᵀ, each column times its scale [n].
UNTORCH_SHIM aoti_torch_cuda__weight_int8pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scales,
                                                 AtenTensorHandle* ret0) {
  constexpr const char* op = "_weight_int8pack_mm";
  return guarded(op, [&] {
    const Tensor &x = cuda_input(self, op, "self"), &weight = cuda_input(mat2, op, "mat2"),
                 &scale = cuda_input(scales, op, "scales");
    check(x.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(x.sizes()));
    check(weight.dim() == 2, op, ": argument 'mat2' must be 2-D, got shape ", to_string(weight.sizes()));
    check(is_floating(x.dtype()) && x.dtype() != DType::kFloat64, op,
          ": argument 'self' must be float32, bfloat16 or float16, got ", dtype_name(x.dtype()));
    check(weight.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(weight.dtype()));
    check(weight.size(1) == x.size(1), op, ": the inner sizes differ: 'self' is ", to_string(x.sizes()), ", 'mat2' is ",
          to_string(weight.sizes()), " (rows are output features)");
    check(scale.dim() == 1 && scale.size(0) == weight.size(0) && scale.dtype() == x.dtype(), op,
          ": argument 'scales' must be ", dtype_name(x.dtype()), " of shape [", weight.size(0), "], got ",
          dtype_name(scale.dtype()), " of shape ", to_string(scale.sizes()));
    const std::int64_t m = x.size(0), n = weight.size(0), k = x.size(1);
    const OnDevice on(op, x, {&weight, &scale});
    TensorPtr out = Tensor::empty(Dims{m, n}, x.dtype(), x.device());
    if (out->numel() != 0) {
      const TensorPtr rows = contiguous(x), values = contiguous(weight), factors = contiguous(scale);
      const TensorPtr product = m > kFewRows && k > 0 ? library_product(on, op, *rows, *values) : nullptr;
      if (product != nullptr) {
        on.launched(kernels::cuda::scale_columns(m, n, x.dtype(), product->data<float>(), factors->raw(), out->raw(),
                                                 on.stream()));
      } else {
        on.launched(kernels::cuda::gemm_int8(m, n, k, x.dtype(), rows->raw(), values->raw(), factors->raw(), out->raw(),
                                             on.stream()));
      }
    }
    give(ret0, std::move(out), op);
  });
}
