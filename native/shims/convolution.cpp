// Convolution: checks the arguments as PyTorch does.
#include "shims/convolution.h"

#include "shims/nn.h"

namespace untorch::shims {

using kernels::ConvolutionShape;

namespace {

// Three-dimensional sizes out of the last `n` of a list, leading ones added.
std::array<std::int64_t, 3> lift(DimSpan values, std::int64_t n, std::int64_t missing) {
  std::array<std::int64_t, 3> out{missing, missing, missing};
  const std::size_t count = static_cast<std::size_t>(n);
  for (std::size_t d = 0; d < count; ++d) out[3 - count + d] = values[values.size() - count + d];
  return out;
}

std::array<std::int64_t, 3> lifted_list(DimSpan values, std::int64_t n, std::int64_t missing, const char* op,
                                        const char* argument) {
  const auto list = expand_list(values, n, op, argument);
  return lift(DimSpan{list.data(), static_cast<std::size_t>(n)}, n, missing);
}

}  // namespace

std::array<std::int64_t, 3> output_padding_of(const char* op, const ConvolutionArguments& arguments, std::int64_t n) {
  if (!arguments.transposed) return {0, 0, 0};
  return lifted_list(arguments.output_padding, n, 0, op, "output_padding");
}

void check_convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                       const ConvolutionArguments& arguments) {
  const std::int64_t ndim = weight.dim();
  check(ndim >= 3 && ndim <= 5, op, ": argument 'weight' must be 3-D, 4-D or 5-D, got shape ",
        to_string(weight.sizes()));
  check(input.dim() == ndim, op, ": argument 'input' must be ", ndim, "-D like weight ", to_string(weight.sizes()),
        ", got shape ", to_string(input.sizes()));
  check(input.dtype() == weight.dtype(), op, ": input is ", dtype_name(input.dtype()), " but weight is ",
        dtype_name(weight.dtype()), "; convert one of them");
  if (!is_floating(input.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
                " is not supported, expected float16, bfloat16, float32 or float64");
  }
  check(arguments.groups > 0, op, ": argument 'groups' must be positive, got ", arguments.groups);
  const std::int64_t groups = arguments.groups;
  const std::int64_t expected = arguments.transposed ? weight.size(0) : weight.size(1) * groups;
  check(weight.size(0) % groups == 0, op, ": weight ", to_string(weight.sizes()), " does not divide into ", groups,
        " groups");
  check(input.size(1) == expected, op, ": weight ", to_string(weight.sizes()), " with groups=", groups, " expects ",
        expected, " input channels, got input ", to_string(input.sizes()));
  if (bias != nullptr) {
    const std::int64_t out = arguments.transposed ? weight.size(1) * groups : weight.size(0);
    check(bias->dim() == 1 && bias->size(0) == out, op, ": argument 'bias' must have shape [", out, "], got ",
          to_string(bias->sizes()));
    check(bias->dtype() == input.dtype(), op, ": bias is ", dtype_name(bias->dtype()), " but input is ",
          dtype_name(input.dtype()), "; convert one of them");
  }
}

ConvolutionShape convolution_shape(const char* op, const Tensor& input, const Tensor& weight,
                                   const ConvolutionArguments& arguments) {
  const std::int64_t n = weight.dim() - 2;
  ConvolutionShape shape{};
  shape.batch = input.size(0);
  shape.groups = arguments.groups;
  shape.in_channels = input.size(1) / arguments.groups;
  shape.out_channels = arguments.transposed ? weight.size(1) : weight.size(0) / arguments.groups;
  shape.input = lift(input.sizes(), n, 1);
  shape.kernel = lift(weight.sizes(), n, 1);
  shape.stride = lifted_list(arguments.stride, n, 1, op, "stride");
  shape.padding = lifted_list(arguments.padding, n, 0, op, "padding");
  shape.dilation = lifted_list(arguments.dilation, n, 1, op, "dilation");
  const auto extra = output_padding_of(op, arguments, n);
  for (std::size_t d = 0; d < 3; ++d) {
    check(shape.kernel[d] > 0, op, ": argument 'weight' has an empty kernel, shape ", to_string(weight.sizes()));
    check(shape.stride[d] > 0, op, ": argument 'stride' must be positive, got ", to_string(arguments.stride));
    check(shape.dilation[d] > 0, op, ": argument 'dilation' must be positive, got ", to_string(arguments.dilation));
    check(shape.padding[d] >= 0, op, ": argument 'padding' must not be negative, got ", to_string(arguments.padding));
    const std::int64_t reach = shape.dilation[d] * (shape.kernel[d] - 1);
    if (arguments.transposed) {
      check(extra[d] >= 0 && (extra[d] < shape.stride[d] || extra[d] < shape.dilation[d]), op,
            ": argument 'output_padding' must be smaller than stride or dilation, got ",
            to_string(arguments.output_padding));
      shape.output[d] = (shape.input[d] - 1) * shape.stride[d] - 2 * shape.padding[d] + reach + extra[d] + 1;
    } else {
      const std::int64_t padded = shape.input[d] + 2 * shape.padding[d];
      check(padded > reach, op, ": kernel ", to_string(weight.sizes()), " with dilation ",
            to_string(arguments.dilation), " is larger than the padded input, got input ", to_string(input.sizes()),
            " with padding ", to_string(arguments.padding));
      shape.output[d] = (padded - reach - 1) / shape.stride[d] + 1;
    }
    check(shape.output[d] >= 0, op, ": the output size is negative for input ", to_string(input.sizes()),
          " and weight ", to_string(weight.sizes()));
  }
  return shape;
}

Dims convolution_output_sizes(const Tensor& input, const ConvolutionShape& shape) {
  Dims sizes(input.sizes());
  sizes[1] = shape.out_channels * shape.groups;
  const std::size_t n = sizes.size() - 2;
  for (std::size_t d = 0; d < n; ++d) sizes[2 + d] = shape.output[3 - n + d];
  return sizes;
}

}  // namespace untorch::shims
