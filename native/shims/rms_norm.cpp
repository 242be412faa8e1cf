// _fused_rms_norm: x * rsqrt(mean(x²) + eps) * weight over the trailing dimensions, and the reciprocal root itself.
#include "kernels/rms_norm.h"

#include <limits>

#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct Shape {
  std::int64_t width = 1;  // elements that are normalised together
  Dims reciprocal;         // the shape of the reciprocal roots: 1 in the normalised dimensions
};

Shape check_shape(const Op& op, const Tensor& x, const Tensor* weight, DimSpan shape) {
  const auto n = static_cast<std::int64_t>(shape.size());
  check(n >= 1 && n <= x.dim(), op, ": argument 'normalized_shape' must have 1 to ", x.dim(), " values, got ",
        to_string(shape));
  Shape out{1, x.sizes()};
  for (std::int64_t d = 0; d < n; ++d) {
    check(x.size(d - n) == shape[static_cast<std::size_t>(d)], op, ": argument 'input' must end in ", to_string(shape),
          ", got shape ", to_string(x.sizes()));
    out.width *= x.size(d - n);
    out.reciprocal[out.reciprocal.size() - static_cast<std::size_t>(n - d)] = 1;
  }
  check(weight == nullptr || to_string(weight->sizes()) == to_string(shape), op, ": argument 'weight' must have shape ",
        to_string(shape), ", got ", weight == nullptr ? "" : std::string(to_string(weight->sizes())));
  return out;
}

}  // namespace

UNTORCH_OP(_fused_rms_norm,
           (AtenTensorHandle input, const std::int64_t* normalized_shape, std::int64_t normalized_shape_len,
            AtenTensorHandle* weight, double* eps, AtenTensorHandle* ret0, AtenTensorHandle* ret1),
           input, normalized_shape, normalized_shape_len, weight, eps, ret0, ret1) {
  const Tensor& x = op.input(input, "input");
  const Tensor* w = op.optional_input(weight, "weight");
  const Shape shape = check_shape(op, x, w, ints(normalized_shape, normalized_shape_len));
  if (!is_floating(x.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'input' must be float16, bfloat16, float32 or float64, got ",
                dtype_name(x.dtype()));
  }
  // The CPU converts a weight of any dtype.
  check(w == nullptr || !op.on_cuda() || is_floating(w->dtype()), op,
        ": argument 'weight' must be floating-point, got ", w == nullptr ? "" : dtype_name(w->dtype()));
  check(ret0 != nullptr && ret1 != nullptr, op, ": output pointer is null");
  const DType compute = x.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  op.check_same_device({&x, w});
  TensorPtr out = Tensor::empty(x.sizes(), x.dtype(), x.device());
  TensorPtr reciprocal = Tensor::empty(shape.reciprocal, compute, x.device());
  const TensorPtr rows = contiguous(x);
  // CUDA's kernel reads a weight of x's dtype as well.
  const bool as_it_is = w != nullptr && op.on_cuda() && w->dtype() == x.dtype();
  const TensorPtr scale = w == nullptr ? nullptr : to_dtype(*w, as_it_is ? x.dtype() : compute);
  // Without an eps, the spacing of the type that the sums run in.
  const double epsilon = eps != nullptr               ? *eps
                         : compute == DType::kFloat64 ? std::numeric_limits<double>::epsilon()
                                                      : static_cast<double>(std::numeric_limits<float>::epsilon());
  const kernels::RmsNorm problem{.dtype = x.dtype(),
                                 .rows = reciprocal->numel(),
                                 .width = shape.width,
                                 .eps = epsilon,
                                 .x = rows->raw(),
                                 .weight = scale == nullptr ? nullptr : scale->raw(),
                                 .weight_dtype = scale == nullptr ? x.dtype() : scale->dtype(),
                                 .out = out->raw(),
                                 .reciprocal = reciprocal->raw()};
  run(
      op, {&x, w}, [&] { kernels::cpu::rms_norm(problem); },
      [&](const auto& on) { return kernels::cuda::rms_norm(problem, on.stream()); });
  give(ret0, std::move(out), op);
  give(ret1, std::move(reciprocal), op);
}
