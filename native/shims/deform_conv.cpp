// torchvision::deform_conv2d, which models reach through the proxy executor. CPU; half types are computed in float32.
#include "kernels/detection.h"
#include "shims/device_work.h"
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Row-major, in a dtype that the kernel has.
TensorPtr dense(const Tensor& t) { return element_size(t.dtype()) == 2 ? to_dtype(t, DType::kFloat32) : contiguous(t); }

void check_shape(const Op& op, const Tensor& t, const char* name, const Dims& shape, DType dtype) {
  const bool same = t.dim() == static_cast<std::int64_t>(shape.size()) &&
                    std::equal(shape.begin(), shape.end(), t.sizes().begin(), t.sizes().end());
  check(same, op, ": argument '", name, "' must be ", to_string(shape), ", got ", to_string(t.sizes()));
  check(t.dtype() == dtype, op, ": argument '", name, "' is ", dtype_name(t.dtype()), ", expected ", dtype_name(dtype),
        " as 'input'");
}

std::int64_t out_size(std::int64_t size, std::int64_t kernel, std::int64_t stride, std::int64_t pad,
                      std::int64_t dilation) {
  return (size + 2 * pad - (dilation * (kernel - 1) + 1)) / stride + 1;
}

}  // namespace

UNTORCH_PROXY_OP(deform_conv2d, "torchvision::deform_conv2d", kOnCpu) {
  const Tensor &input = call.tensor("input"), &weight = call.tensor("weight"), &offset = call.tensor("offset"),
               &bias = call.tensor("bias");
  const Tensor* const mask = call.flag("use_mask") ? &call.tensor("mask") : nullptr;
  kernels::DeformConv p;
  p.stride_h = call.integer("stride_h"), p.stride_w = call.integer("stride_w");
  p.pad_h = call.integer("pad_h"), p.pad_w = call.integer("pad_w");
  p.dilation_h = call.integer("dilation_h"), p.dilation_w = call.integer("dilation_w");
  p.groups = call.integer("groups"), p.offset_groups = call.integer("offset_groups");
  if (!is_floating(input.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'input' is ", dtype_name(input.dtype()),
                ", expected float32, float64, bfloat16 or float16");
  }
  check(input.dim() == 4 && weight.dim() == 4, op, ": expected 'input' and 'weight' of 4 dimensions, got ",
        to_string(input.sizes()), " and ", to_string(weight.sizes()));
  check(p.stride_h > 0 && p.stride_w > 0 && p.dilation_h > 0 && p.dilation_w > 0 && p.pad_h >= 0 && p.pad_w >= 0, op,
        ": strides and dilations must be 1 or more, and paddings 0 or more");
  p.batch = input.size(0), p.channels = input.size(1), p.height = input.size(2), p.width = input.size(3);
  p.out_channels = weight.size(0), p.kernel_h = weight.size(2), p.kernel_w = weight.size(3);
  check(p.kernel_h > 0 && p.kernel_w > 0, op, ": argument 'weight' is empty: ", to_string(weight.sizes()));
  check(p.groups > 0 && p.offset_groups > 0 && p.channels % p.groups == 0 && p.out_channels % p.groups == 0 &&
            p.channels % p.offset_groups == 0,
        op, ": ", p.channels, " input and ", p.out_channels, " output channels do not divide into ", p.groups,
        " groups and ", p.offset_groups, " offset groups");
  p.out_h = out_size(p.height, p.kernel_h, p.stride_h, p.pad_h, p.dilation_h);
  p.out_w = out_size(p.width, p.kernel_w, p.stride_w, p.pad_w, p.dilation_w);
  check(p.out_h > 0 && p.out_w > 0, op, ": the result would have ", p.out_h, " × ", p.out_w, " pixels");
  const std::int64_t kernel = p.kernel_h * p.kernel_w;
  const DType dtype = input.dtype();
  check_shape(op, weight, "weight", {p.out_channels, p.channels / p.groups, p.kernel_h, p.kernel_w}, dtype);
  check_shape(op, offset, "offset", {p.batch, p.offset_groups * 2 * kernel, p.out_h, p.out_w}, dtype);
  if (mask != nullptr) check_shape(op, *mask, "mask", {p.batch, p.offset_groups * kernel, p.out_h, p.out_w}, dtype);
  check_shape(op, bias, "bias", {p.out_channels}, dtype);
  const bool half = element_size(dtype) == 2;
  p.dtype = half ? DType::kFloat32 : dtype;
  TensorPtr out = Tensor::empty(Dims{p.batch, p.out_channels, p.out_h, p.out_w}, p.dtype, input.device());
  if (out->numel() != 0) {
    const TensorPtr image = dense(input), filters = dense(weight), moves = dense(offset), start = dense(bias),
                    scales = mask != nullptr ? dense(*mask) : nullptr;
    p.input = image->raw(), p.weight = filters->raw(), p.offset = moves->raw(), p.bias = start->raw();
    p.mask = scales != nullptr ? scales->raw() : nullptr;
    p.out = out->raw();
    kernels::cpu::deform_conv2d(p);
  }
  call.give(0, half ? to_dtype(*out, dtype) : std::move(out));
}
