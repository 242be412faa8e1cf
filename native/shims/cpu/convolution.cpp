// Convolution: checks the arguments as PyTorch does, chooses the memory format and the kernel.
#include "shims/cpu/convolution.h"

#include "kernels/cpu/convolution.h"
#include "shims/cpu/nn.h"

namespace untorch::shims {
namespace {

using kernels::ConvolutionShape;

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

void check_tensors(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
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

ConvolutionShape shape_of(const char* op, const Tensor& input, const Tensor& weight,
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
  std::array<std::int64_t, 3> extra{};
  if (arguments.transposed) extra = lifted_list(arguments.output_padding, n, 0, op, "output_padding");
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

// oneDNN takes the half types where the CPU has instructions for them, as PyTorch asks it.
bool onednn_serves(DType dtype) {
  if (dtype == DType::kFloat32) return true;
#if defined(__x86_64__)
  if (dtype == DType::kBFloat16) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
  }
  if (dtype == DType::kFloat16) return __builtin_cpu_supports("avx512fp16");
#endif
  return false;
}

// The memory format that PyTorch's own choice of backend gives; compiled models count on it. Channels last wins when
// either operand is in it; in three dimensions only where oneDNN is the backend, which small float32 problems, dtypes
// that it does not serve on this CPU and large output padding are not given to.
bool gives_channels_last(const Tensor& input, const Tensor& weight, const ConvolutionArguments& arguments,
                         const ConvolutionShape& shape) {
  if (!suggests_channels_last(input) && !suggests_channels_last(weight)) return false;
  if (input.dim() == 4) return true;
  if (!onednn_serves(input.dtype())) return false;
  if (arguments.transposed) {
    const auto extra = lifted_list(arguments.output_padding, 3, 0, "convolution", "output_padding");
    for (std::size_t d = 0; d < 3; ++d) {
      if (extra[d] >= shape.stride[d]) return false;
    }
  }
  if (input.dtype() != DType::kFloat32) return true;
  constexpr std::int64_t kLargeEnough = 20480;
  return shape.groups > 1 || (weight.size(-1) > 3 && weight.size(-2) > 3) || input.size(0) > 1 ||
         input.size(0) * input.size(1) * input.size(2) * input.size(3) > kLargeEnough;
}

template <class T>
void run(const ConvolutionShape& shape, const Tensor& input, const Tensor& weight, const Tensor* bias, bool transposed,
         const Tensor& out) {
  const TensorPtr bias_row = bias == nullptr ? nullptr : contiguous(*bias);
  const T* bias_data = bias_row == nullptr ? nullptr : bias_row->data<T>();
  if (transposed) {
    const TensorPtr x = contiguous(input), w = contiguous(weight);
    if (out.is_contiguous()) {
      kernels::convolution_transposed(shape, x->data<T>(), w->data<T>(), bias_data, out.data<T>());
    } else {
      const TensorPtr rows = Tensor::empty(out.sizes(), out.dtype());
      kernels::convolution_transposed(shape, x->data<T>(), w->data<T>(), bias_data, rows->data<T>());
      copy_cpu(out, *rows);
    }
    return;
  }
  const bool depthwise = shape.in_channels == 1 && shape.groups > 1;
  if (!shape.channels_last) {
    const TensorPtr x = contiguous(input), w = contiguous(weight);
    if (depthwise) {
      kernels::convolution_depthwise(shape, x->data<T>(), w->data<T>(), bias_data, out.data<T>());
    } else {
      kernels::convolution(shape, x->data<T>(), w->data<T>(), bias_data, out.data<T>());
    }
    return;
  }
  const TensorPtr x = channels_last_contiguous(input);
  if (depthwise && shape.out_channels == 1) {
    // [channels, 1, kernel…] seen as [kernel…, channels].
    Dims sizes, strides;
    sizes.resize(static_cast<std::size_t>(weight.dim() - 1));
    strides.resize(sizes.size());
    for (std::size_t d = 0; d + 1 < sizes.size(); ++d) {
      sizes[d] = weight.sizes()[d + 2];
      strides[d] = weight.strides()[d + 2];
    }
    sizes[sizes.size() - 1] = weight.size(0);
    strides[sizes.size() - 1] = weight.stride(0);
    const TensorPtr w = contiguous(*weight.view(sizes, strides, weight.storage_offset()));
    kernels::convolution_depthwise(shape, x->data<T>(), w->data<T>(), bias_data, out.data<T>());
  } else {
    const TensorPtr w = channels_last_contiguous(weight);
    kernels::convolution(shape, x->data<T>(), w->data<T>(), bias_data, out.data<T>());
  }
}

}  // namespace

TensorPtr convolution(const char* op, const Tensor& input, const Tensor& weight, const Tensor* bias,
                      const ConvolutionArguments& arguments) {
  check_tensors(op, input, weight, bias, arguments);
  ConvolutionShape shape = shape_of(op, input, weight, arguments);
  shape.channels_last = gives_channels_last(input, weight, arguments, shape);
  Dims sizes(input.sizes());
  sizes[1] = shape.out_channels * shape.groups;
  const std::size_t n = sizes.size() - 2;
  for (std::size_t d = 0; d < n; ++d) sizes[2 + d] = shape.output[3 - n + d];
  const DType dtype = input.dtype();
  TensorPtr out = empty_format(sizes, dtype, shape.channels_last);
  if (out->numel() == 0) return out;
  if (dtype == DType::kFloat64) {
    run<double>(shape, input, weight, bias, arguments.transposed, *out);
  } else if (dtype == DType::kFloat32) {
    run<float>(shape, input, weight, bias, arguments.transposed, *out);
  } else {
    const TensorPtr x = empty_format(input.sizes(), DType::kFloat32, shape.channels_last);
    copy_cpu(*x, input);
    const TensorPtr w = to_dtype(weight, DType::kFloat32);
    const TensorPtr b = bias == nullptr ? nullptr : to_dtype(*bias, DType::kFloat32);
    const TensorPtr wide = empty_format(sizes, DType::kFloat32, shape.channels_last);
    run<float>(shape, *x, *w, b.get(), arguments.transposed, *wide);
    copy_cpu(*out, *wide);
  }
  return out;
}

}  // namespace untorch::shims

using namespace untorch;
using namespace untorch::shims;

UNTORCH_SHIM aoti_torch_cpu_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias,
                                        const std::int64_t* stride, std::int64_t stride_len,
                                        const std::int64_t* padding, std::int64_t padding_len,
                                        const std::int64_t* dilation, std::int64_t dilation_len,
                                        std::int32_t transposed, const std::int64_t* output_padding,
                                        std::int64_t output_padding_len, std::int64_t groups, AtenTensorHandle* ret0) {
  return guarded("convolution", [&] {
    const ConvolutionArguments arguments{ints(stride, stride_len),
                                         ints(padding, padding_len),
                                         ints(dilation, dilation_len),
                                         ints(output_padding, output_padding_len),
                                         transposed != 0,
                                         groups};
    give(
        ret0,
        convolution("convolution", cpu_input(input, "convolution", "input"), cpu_input(weight, "convolution", "weight"),
                    optional_cpu_input(bias, "convolution", "bias"), arguments),
        "convolution");
  });
}

UNTORCH_SHIM aoti_torch_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle bias,
                                    const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* padding,
                                    std::int64_t padding_len, const std::int64_t* dilation, std::int64_t dilation_len,
                                    int transposed, const std::int64_t* output_padding, std::int64_t output_padding_len,
                                    std::int64_t groups, AtenTensorHandle* ret) {
  return aoti_torch_cpu_convolution(input, weight, &bias, stride, stride_len, padding, padding_len, dilation,
                                    dilation_len, transposed, output_padding, output_padding_len, groups, ret);
}
