// Convolution on the CPU: chooses the memory format and the kernel.
#include "shims/cpu/convolution.h"

#include "kernels/cpu/convolution/convolution.h"
#include "shims/nn.h"

namespace untorch::shims {
namespace {

using kernels::ConvolutionShape;

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
    const auto extra = output_padding_of("convolution", arguments, 3);
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
  check_convolution(op, input, weight, bias, arguments);
  ConvolutionShape shape = convolution_shape(op, input, weight, arguments);
  shape.channels_last = gives_channels_last(input, weight, arguments, shape);
  const Dims sizes = convolution_output_sizes(input, shape);
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
