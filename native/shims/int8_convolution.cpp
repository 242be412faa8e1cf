// untorch::int8_convolution on the CPU: checks the arguments, brings operands into NHWC, calls the W8A8 kernels.
#include <string_view>
#include <utility>

#include "kernels/cpu/w8a8/convolution.h"
#include "shims/activation.h"
#include "shims/convolution_operands.h"
#include "shims/destination.h"

namespace untorch::shims {
namespace {

using kernels::ActivationRange;
using kernels::ByteScale;
using kernels::Int8Convolution;

constexpr const char* kOp = "int8_convolution";

ActivationRange range_of(const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
  if (wanted == "asymmetric") return ActivationRange::kAsymmetric;
  if (wanted == "symmetric") return ActivationRange::kSymmetric;
  if (wanted == "static") return ActivationRange::kStatic;
  if (wanted == "tensor") return ActivationRange::kTensor;
  throw_error(ErrorKind::kUnsupported, kOp, ": input_range '", wanted,
              "' is not supported, expected asymmetric, symmetric, static or tensor");
}

ByteScale byte_scale(const char* name, double scale, std::int64_t zero) {
  check(scale > 0 && scale <= 3.4028234663852886e38, kOp, ": ", name, "_scale must be above 0 and finite, got ", scale);
  check(zero >= 0 && zero <= 255, kOp, ": ", name, "_zero must be 0 to 255, got ", zero);
  return {static_cast<float>(scale), static_cast<std::int32_t>(zero)};
}

TensorPtr per_output(const char* name, const Tensor& tensor, DType dtype, std::int64_t padded) {
  check(tensor.dtype() == dtype && tensor.dim() == 1 && tensor.size(0) == padded, kOp, ": argument '", name,
        "' must be ", dtype_name(dtype), " of shape [", padded, "], got ", dtype_name(tensor.dtype()), " of shape ",
        to_string(tensor.sizes()));
  return contiguous(tensor);
}

void check_activations(const char* name, const Tensor& tensor) {
  check(tensor.dtype() == DType::kFloat32 || tensor.dtype() == DType::kUInt8, kOp, ": argument '", name,
        "' must be float32 or uint8, got ", dtype_name(tensor.dtype()));
}

struct Arguments {
  AtenTensorHandle x, weight, scale, column_sums;
  AtenTensorHandle *bias, *residual;
  std::int64_t out_channels;
  std::array<const std::int64_t*, 4> lists;
  std::array<std::int64_t, 4> lengths;
  std::int64_t groups;
  const char* activation;
  bool residual_first;
  const char* input_range;
  double input_scale;
  std::int64_t input_zero;
  double residual_scale;
  std::int64_t residual_zero;
  double output_scale;
  std::int64_t output_zero;
};

// A result in NHWC. `into`: null, or memory for it.
TensorPtr int8_convolution(const Arguments& given, const Tensor* into) {
  const Tensor& input = cpu_input(given.x, kOp, "x");
  const Tensor& packed = cpu_input(given.weight, kOp, "weight");
  const Tensor& scale = cpu_input(given.scale, kOp, "scale");
  const Tensor& sums = cpu_input(given.column_sums, kOp, "column_sums");
  const Tensor* const added = optional_cpu_input(given.bias, kOp, "bias");
  const Tensor* rest = optional_cpu_input(given.residual, kOp, "residual");
  check_activations("x", input);
  check(input.dim() == 4, kOp, ": argument 'x' must be 4-D, got shape ", to_string(input.sizes()));
  const std::int64_t groups = given.groups, out_channels = given.out_channels;
  check(groups > 0 && input.size(1) % groups == 0 && out_channels >= 0 && out_channels % groups == 0, kOp, ": ",
        input.size(1), " → ", out_channels, " channels do not divide into ", groups, " groups");
  Int8Convolution p{};
  p.batch = input.size(0), p.groups = groups;
  p.in_channels = input.size(1) / groups, p.out_channels = out_channels / groups;
  p.input = {input.size(2), input.size(3)};
  p.kernel = pair_of(kOp, given.lists[0], given.lengths[0], 1, "kernel");
  p.stride = pair_of(kOp, given.lists[1], given.lengths[1], 1, "stride");
  p.padding = pair_of(kOp, given.lists[2], given.lengths[2], 0, "padding");
  p.dilation = pair_of(kOp, given.lists[3], given.lengths[3], 1, "dilation");
  p.epilogue = {activation_of(kOp, given.activation), given.residual_first};
  for (std::size_t d = 0; d < 2; ++d) {
    const std::int64_t room = p.input[d] + 2 * p.padding[d] - p.dilation[d] * (p.kernel[d] - 1) - 1;
    check(room >= 0, kOp, ": the kernel is larger than the padded input ", to_string(input.sizes()));
    p.output[d] = room / p.stride[d] + 1;
  }
  check(p.taps() * p.in_channels <= kernels::kInt8MaxK, kOp, ": an output has ", p.taps() * p.in_channels,
        " weights, the sums of more than ", kernels::kInt8MaxK, " do not fit int32");
  check(!p.depthwise() || p.taps() <= kernels::kInt8DepthwiseTaps, kOp, ": a depthwise kernel may have ",
        kernels::kInt8DepthwiseTaps, " elements, got ", p.taps());
  check(packed.dtype() == DType::kInt8 && packed.numel() == p.weight_size(), kOp,
        ": argument 'weight' must be int8 with ", p.weight_size(), " elements for ", input.size(1), " → ", out_channels,
        " channels, got ", dtype_name(packed.dtype()), " of shape ", to_string(packed.sizes()));
  p.range = range_of(given.input_range);
  if (input.dtype() == DType::kUInt8) {
    check(p.range == ActivationRange::kStatic, kOp, ": argument 'x' is uint8, which has a static range, got '",
          given.input_range, "'");
  }
  if (p.range == ActivationRange::kStatic) p.input_scale = byte_scale("input", given.input_scale, given.input_zero);
  if (p.range == ActivationRange::kTensor) {
    check(given.input_scale >= 0x1p-126 && given.input_scale <= 3.4028234663852886e38, kOp,
          ": input_scale, the least scale, must be at least 2^-126 and finite, got ", given.input_scale);
    p.input_scale = {static_cast<float>(given.input_scale), 0};
  }
  if (given.output_scale != 0.0) p.output_scale = byte_scale("output", given.output_scale, given.output_zero);

  const Dims sizes{input.size(0), out_channels, p.output[0], p.output[1]};
  const TensorPtr dense_weight = contiguous(packed);
  const TensorPtr dense_scale = per_output("scale", scale, DType::kFloat32, p.padded_outputs());
  const TensorPtr dense_sums = per_output("column_sums", sums, DType::kInt32, p.padded_outputs());
  TensorPtr dense_bias, dense_residual, dense_input;
  if (added != nullptr) {
    check(added->dtype() == DType::kFloat32 && added->dim() == 1 && added->size(0) == out_channels, kOp,
          ": argument 'bias' must be float32 of shape [", out_channels, "], got ", dtype_name(added->dtype()),
          " of shape ", to_string(added->sizes()));
    dense_bias = contiguous(*added);
  }
  if (rest != nullptr) {
    check_activations("residual", *rest);
    check(rest->sizes() == sizes, kOp, ": argument 'residual' must have shape ", to_string(sizes), ", got ",
          to_string(rest->sizes()));
    if (rest->dtype() == DType::kUInt8) {
      p.residual_scale = byte_scale("residual", given.residual_scale, given.residual_zero);
    }
    if (!is_nhwc(*rest)) dense_residual = nhwc_copy(*rest), rest = dense_residual.get();
  }
  const Tensor* from = &input;
  const bool dense_rows = input.size(3) <= 1 || input.stride(3) == 1;
  if (!has_dense_pixels(input) && !dense_rows) dense_input = nhwc_copy(input), from = dense_input.get();
  // The stride of a dimension of one element says nothing.
  const std::int64_t c = from->size(1), h = from->size(2), w = from->size(3);
  kernels::ImageStrides strides{};
  strides.channel = c > 1 ? from->stride(1) : 1;
  strides.pixel = w > 1 ? from->stride(3) : strides.channel == 1 ? c : 1;
  strides.row = h > 1 ? from->stride(2) : w * strides.pixel;
  strides.batch = p.batch > 1 ? from->stride(0) : 0;

  const DType dtype = given.output_scale != 0.0 ? DType::kUInt8 : DType::kFloat32;
  TensorPtr out = empty_nhwc(sizes, dtype);
  if (out->numel() != 0) {
    p.weight = dense_weight->data<std::int8_t>(), p.scale = dense_scale->data<float>();
    p.column_sums = dense_sums->data<std::int32_t>();
    p.bias = dense_bias ? dense_bias->data<float>() : nullptr;
    kernels::int8_convolution(p, from->raw(), from->dtype() == DType::kFloat32, strides,
                              rest != nullptr ? rest->raw() : nullptr, out->raw());
  }
  if (into != nullptr) {
    check(into->dtype() == dtype && into->sizes() == sizes, kOp, ": argument 'out' must be ", dtype_name(dtype),
          " of shape ", to_string(sizes), ", got ", dtype_name(into->dtype()), " of shape ", to_string(into->sizes()));
    Tensor destination_view(*into);
    copy_cpu(destination_view, *out);
  }
  return out;
}

}  // namespace

// x [n, c, h, w] and residual [n, out_channels, h', w'] are float32 or uint8; see kernels/cpu/w8a8/convolution.h.
UNTORCH_SHIM aoti_torch_cpu_untorch_int8_convolution(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle column_sums,
    AtenTensorHandle* bias, AtenTensorHandle* residual, std::int64_t out_channels, const std::int64_t* kernel,
    std::int64_t kernel_len, const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,
    std::int64_t padding_len, const std::int64_t* dilation, std::int64_t dilation_len, std::int64_t groups,
    const char* activation, std::int32_t residual_first, const char* input_range, double input_scale,
    std::int64_t input_zero, double residual_scale, std::int64_t residual_zero, double output_scale,
    std::int64_t output_zero, std::int32_t channels_last, AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    check(ret0 != nullptr, kOp, ": output pointer is null");
    TensorPtr out = int8_convolution({x,
                                      weight,
                                      scale,
                                      column_sums,
                                      bias,
                                      residual,
                                      out_channels,
                                      {kernel, stride, padding, dilation},
                                      {kernel_len, stride_len, padding_len, dilation_len},
                                      groups,
                                      activation,
                                      residual_first != 0,
                                      input_range,
                                      input_scale,
                                      input_zero,
                                      residual_scale,
                                      residual_zero,
                                      output_scale,
                                      output_zero},
                                     nullptr);
    give(ret0, channels_last != 0 ? std::move(out) : contiguous(*out), kOp);
  });
}

// The same into memory of the caller, of any strides. lists: kernel, stride, padding, dilation, two values each.
UNTORCH_SHIM untorch_int8_convolution(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                      AtenTensorHandle scale, AtenTensorHandle column_sums, AtenTensorHandle* bias,
                                      AtenTensorHandle* residual, std::int64_t out_channels, AtenTensorHandle lists,
                                      std::int64_t groups, const char* activation, std::int64_t residual_first,
                                      const char* input_range, double input_scale, std::int64_t input_zero,
                                      double residual_scale, std::int64_t residual_zero, double output_scale,
                                      std::int64_t output_zero) {
  return guarded(kOp, [&] {
    const Tensor& sizes = cpu_input(lists, kOp, "lists");
    check(sizes.dtype() == DType::kInt32 && sizes.numel() == 8 && sizes.is_contiguous(), kOp,
          ": argument 'lists' must be int32 with 8 values");
    std::array<std::int64_t, 8> values{};
    for (std::size_t i = 0; i < 8; ++i) values[i] = sizes.data<std::int32_t>()[i];
    const std::int64_t* const first = values.data();
    (void)int8_convolution({x,
                            weight,
                            scale,
                            column_sums,
                            bias,
                            residual,
                            out_channels,
                            {first, first + 2, first + 4, first + 6},
                            {2, 2, 2, 2},
                            groups,
                            activation,
                            residual_first != 0,
                            input_range,
                            input_scale,
                            input_zero,
                            residual_scale,
                            residual_zero,
                            output_scale,
                            output_zero},
                           &cpu_input(out, kOp, "out"));
  });
}

}  // namespace untorch::shims
