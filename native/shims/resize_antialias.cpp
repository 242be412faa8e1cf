// aten::_upsample_bilinear2d_aa and aten::_upsample_bicubic2d_aa on a GPU: the width, then the height. Half types stay
// in float32 in between.
#include "kernels/resize.h"
#include "shims/device_work.h"
#include "shims/nn.h"
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Input steps an output step, as PyTorch has it.
double step_of(std::int64_t size, std::int64_t target, bool align_corners, std::optional<double> factor) {
  if (align_corners) return target > 1 ? static_cast<double>(size - 1) / static_cast<double>(target - 1) : 0;
  return factor && *factor > 0 ? 1 / *factor : static_cast<double>(size) / static_cast<double>(target);
}

void resize(const Op& op, const ProxyCall& call, kernels::ResizeFilter filter) {
  const Tensor& t = call.tensor("self");
  const auto target = call.integers("output_size");
  check(t.dim() == 4, op, ": argument 'self' must be [batch, channels, height, width], got ", to_string(t.sizes()));
  check(target.size() == 2 && target[0] > 0 && target[1] > 0, op, ": 'output_size' must be 2 numbers above 0, got ",
        to_string(target));
  check(t.size(1) > 0 && t.size(2) > 0 && t.size(3) > 0, op,
        ": argument 'self' has no elements: ", to_string(t.sizes()));
  if (!is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                " is not supported on a GPU, expected a floating type");
  }
  const bool align_corners = call.flag("align_corners");
  const std::optional<double> factors[] = {call.optional_number("scales_h"), call.optional_number("scales_w")};
  const Dims shape{t.size(0), t.size(1), target[0], target[1]};
  TensorPtr out = Tensor::empty(shape, t.dtype(), t.device());
  run(
      op, {&t}, [] {},
      [&](const auto& on) {
        const TensorPtr image = contiguous(t);
        const std::int64_t planes = t.size(0) * t.size(1);
        const DType between = element_size(t.dtype()) == 2 ? DType::kFloat32 : t.dtype();
        const TensorPtr wide = Tensor::empty(Dims{planes, t.size(2), target[1]}, between, on.device());
        kernels::ResizeAxis p;
        p.filter = filter;
        p.input = image->raw(), p.in_dtype = t.dtype(), p.out = wide->raw(), p.out_dtype = between;
        p.outer = planes * t.size(2), p.size = t.size(3), p.target = target[1], p.inner = 1;
        p.scale = step_of(t.size(3), target[1], align_corners, factors[1]);
        on.launched(kernels::cuda::resize_axis(p, on.stream()));
        p.input = wide->raw(), p.in_dtype = between, p.out = out->raw(), p.out_dtype = t.dtype();
        p.outer = planes, p.size = t.size(2), p.target = target[0], p.inner = target[1];
        p.scale = step_of(t.size(2), target[0], align_corners, factors[0]);
        on.launched(kernels::cuda::resize_axis(p, on.stream()));
        if (suggests_channels_last(t)) out = channels_last_contiguous(*out);
      });
  call.give(0, std::move(out));
}

}  // namespace

UNTORCH_PROXY_OP(upsample_bilinear2d_aa, "aten::_upsample_bilinear2d_aa", kOnCuda) {
  resize(op, call, kernels::ResizeFilter::kLinear);
}

UNTORCH_PROXY_OP(upsample_bicubic2d_aa, "aten::_upsample_bicubic2d_aa", kOnCuda) {
  resize(op, call, kernels::ResizeFilter::kCubic);
}
