// fused_convolution on CUDA: a convolution with the residual sum and the activation behind it, channels last.
#include <string_view>
#include <utility>

#include "shims/convolution.h"
#include "shims/destination.h"

namespace untorch::shims {
namespace {

using kernels::ConvolutionEpilogue;
using kernels::FusedUnary;

// The stored weight [o, kernel…, c] as [o, c, kernel…]; a depthwise one, [kernel…, o], has one dimension less than x.
TensorPtr weight_view(const char* op, const Tensor& stored, const Tensor& x) {
  const std::int64_t ndim = x.dim();
  check(ndim == 4 || ndim == 5, op, ": argument 'x' must be 4-D or 5-D, got shape ", to_string(x.sizes()));
  const bool depthwise = stored.dim() == ndim - 1;
  check(depthwise || stored.dim() == ndim, op, ": argument 'weight' must be ", ndim, "-D, or ", ndim - 1,
        "-D of a depthwise convolution, got shape ", to_string(stored.sizes()));
  Dims sizes(x.sizes()), strides(x.strides());
  const auto last = static_cast<std::size_t>(stored.dim() - 1);
  if (depthwise) {
    sizes[0] = stored.sizes()[last], strides[0] = stored.strides()[last];
    sizes[1] = 1, strides[1] = 1;
    for (std::size_t d = 0; d < last; ++d) sizes[2 + d] = stored.sizes()[d], strides[2 + d] = stored.strides()[d];
  } else {
    sizes[0] = stored.sizes()[0], strides[0] = stored.strides()[0];
    sizes[1] = stored.sizes()[last], strides[1] = stored.strides()[last];
    for (std::size_t d = 1; d < last; ++d) sizes[1 + d] = stored.sizes()[d], strides[1 + d] = stored.strides()[d];
  }
  return stored.view(sizes, strides, stored.storage_offset());
}

ConvolutionEpilogue parse_activation(const char* op, const char* activation) {
  const std::string_view wanted = activation == nullptr ? "none" : activation;
  constexpr std::pair<std::string_view, ConvolutionEpilogue> kNames[] = {
      {"none", {}},
      {"relu", {FusedUnary::kRelu}},
      {"relu6", {FusedUnary::kHardtanh, 0, 6}},
      {"silu", {FusedUnary::kSwish}},
      {"hardswish", {FusedUnary::kHardswish}},
      {"hardsigmoid", {FusedUnary::kHardsigmoid}},
      {"sigmoid", {FusedUnary::kSigmoid}},
      {"tanh", {FusedUnary::kTanh}},
      {"gelu", {FusedUnary::kGelu}},
      {"gelu_tanh", {FusedUnary::kGeluTanh}},
  };
  for (const auto& [name, epilogue] : kNames) {
    if (name == wanted) return epilogue;
  }
  throw_error(ErrorKind::kInvalidArgument, op,
              ": argument 'activation' must be none, relu, relu6, silu, hardswish, hardsigmoid, sigmoid, tanh, gelu or "
              "gelu_tanh, got '",
              wanted, "'");
}

}  // namespace

// The memory format is of the traced graph: results are channels last. plan: what untorch_tune_fused_convolution gave.
UNTORCH_SHIM aoti_torch_cuda_fused_convolution(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle* residual,
    const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding, std::int64_t padding_len,
    const std::int64_t* dilation, std::int64_t dilation_len, std::int32_t transposed,
    const std::int64_t* output_padding, std::int64_t output_padding_len, std::int64_t groups, const char* activation,
    std::int32_t /*channels_last*/, const char* plan, AtenTensorHandle* ret0) {
  constexpr Op op{"fused_convolution", DeviceType::kCUDA};
  return guarded(op, [&] {
    check_interrupt();
    const ConvolutionArguments arguments{ints(stride, stride_len),
                                         ints(padding, padding_len),
                                         ints(dilation, dilation_len),
                                         ints(output_padding, output_padding_len),
                                         transposed != 0,
                                         groups};
    const Tensor& images = op.input(x, "x");
    const TensorPtr kernel = weight_view(op, op.input(weight, "weight"), images);
    const ConvolutionTail tail{op.optional_input(residual, "residual"), parse_activation(op, activation),
                               plan == nullptr ? std::string_view() : std::string_view(plan)};
    give(ret0, convolution_with_tail(op, images, *kernel, op.optional_input(bias, "bias"), arguments, tail), op);
  });
}

// Times cuDNN's algorithms for tensors of the caller, on its stream, and writes the fastest one's plan into `plan`: at
// most `size` bytes with the zero at the end; empty where there is no choice. Microseconds of cuDNN's choice and of the
// fastest.
UNTORCH_SHIM untorch_tune_fused_convolution(
    AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
    AtenTensorHandle* residual, const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,
    std::int64_t padding_len, const std::int64_t* dilation, std::int64_t dilation_len, std::int64_t transposed,
    const std::int64_t* output_padding, std::int64_t output_padding_len, std::int64_t groups, const char* activation,
    std::int64_t tf32, char* plan, std::int64_t size, double* first_us, double* best_us) {
  constexpr Op op{"fused_convolution", DeviceType::kCUDA};
  return guarded(op, [&] {
    check(plan != nullptr && size > 0 && first_us != nullptr && best_us != nullptr, op, ": output pointer is null");
    const ConvolutionArguments arguments{ints(stride, stride_len),
                                         ints(padding, padding_len),
                                         ints(dilation, dilation_len),
                                         ints(output_padding, output_padding_len),
                                         transposed != 0,
                                         groups};
    const Tensor& images = op.input(x, "x");
    const TensorPtr kernel = weight_view(op, op.input(weight, "weight"), images);
    const ConvolutionTail tail{op.optional_input(residual, "residual"), parse_activation(op, activation), {}};
    const FromTorch relaxed(op);
    const cuda::DnnTuning found = tune_convolution(op, op.input(out, "out"), images, *kernel,
                                                   op.optional_input(bias, "bias"), arguments, tail, tf32 != 0);
    check(found.plan.size() < static_cast<std::size_t>(size), op, ": the plan needs ", found.plan.size(), " bytes");
    plan[found.plan.copy(plan, found.plan.size())] = 0;
    *first_us = found.first_us, *best_us = found.best_us;
  });
}

}  // namespace untorch::shims
