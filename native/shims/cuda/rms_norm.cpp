// _fused_rms_norm on the GPU: x * rsqrt(mean(x²) + eps) * weight over the trailing dimensions, and the root itself.
#include "shims/rms_norm.h"

#include <limits>

#include "kernels/cuda/reduce/rms_norm.h"
#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "_fused_rms_norm";

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__fused_rms_norm(AtenTensorHandle input, const std::int64_t* normalized_shape,
                                             std::int64_t normalized_shape_len, AtenTensorHandle* weight, double* eps,
                                             AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(kOp, [&] {
    const Tensor& x = cuda_input(input, kOp, "input");
    const Tensor* w = optional_cuda_input(weight, kOp, "weight");
    const RmsNormShape shape = rms_norm_shape(kOp, x, w, ints(normalized_shape, normalized_shape_len));
    if (!is_floating(x.dtype())) {
      throw_error(ErrorKind::kUnsupported, kOp,
                  ": argument 'input' must be float16, bfloat16, float32 or float64, got ", dtype_name(x.dtype()));
    }
    check(w == nullptr || is_floating(w->dtype()), kOp, ": argument 'weight' must be floating-point, got ",
          w == nullptr ? "" : dtype_name(w->dtype()));
    check(ret0 != nullptr && ret1 != nullptr, kOp, ": output pointer is null");
    const OnDevice on(kOp, x, {w});
    const DType compute = x.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    TensorPtr out = Tensor::empty(x.sizes(), x.dtype(), on.device());
    TensorPtr reciprocal = Tensor::empty(shape.reciprocal, compute, on.device());
    const TensorPtr rows = contiguous(x);
    // The kernel reads a weight of either dtype; another one is converted.
    const TensorPtr scale = w == nullptr ? nullptr : to_dtype(*w, w->dtype() == x.dtype() ? x.dtype() : compute);
    // Without an eps, the spacing of the type that the sums run in.
    const double epsilon = eps != nullptr               ? *eps
                           : compute == DType::kFloat64 ? std::numeric_limits<double>::epsilon()
                                                        : static_cast<double>(std::numeric_limits<float>::epsilon());
    on.launched(kernels::cuda::rms_norm(rows->raw(), x.dtype(), scale == nullptr ? nullptr : scale->raw(),
                                        scale == nullptr ? x.dtype() : scale->dtype(), reciprocal->numel(), shape.width,
                                        epsilon, out->raw(), reciprocal->raw(), on.stream()));
    give(ret0, std::move(out), kOp);
    give(ret1, std::move(reciprocal), kOp);
  });
}
