// Convolution on CUDA: the memory format that PyTorch gives, and who computes it.
//
// cuDNN computes everything but depthwise problems, which are bound by memory and which our direct kernel reads once.
// What cuDNN has no deterministic algorithm for in one layout is tried row-major; what it refuses there too (more than
// 2^31 elements, output padding that is not smaller than the stride) the direct kernel computes as well.
#include "shims/convolution.h"

#include "cuda/blas.h"
#include "cuda/dnn.h"
#include "kernels/cuda/vision/direct_convolution.h"
#include "shims/cuda/shim.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "convolution";
using kernels::ConvolutionShape;
using kernels::cuda::ConvolutionStrides;

// PyTorch's choice: channels last when either operand is, but for float64 and for what its cuDNN backend is not given
// (empty problems, and output padding that is not smaller than the stride). Compiled models count on it.
bool gives_channels_last(const Tensor& input, const Tensor& weight, const ConvolutionArguments& arguments,
                         const ConvolutionShape& shape) {
  if (input.dtype() == DType::kFloat64 || input.numel() == 0 || weight.numel() == 0) return false;
  const auto extra = output_padding_of(kOp, arguments, input.dim() - 2);
  for (std::size_t d = 0; d < 3; ++d) {
    if (arguments.transposed && extra[d] >= shape.stride[d]) return false;
  }
  return suggests_channels_last(input) || suggests_channels_last(weight);
}

// Batch, channel and three spatial strides; dimensions that are not there have size 1.
ConvolutionStrides strides_of(const Tensor& tensor) {
  ConvolutionStrides out{};
  const std::int64_t n = tensor.dim() - 2;
  out.at[0] = tensor.stride(0);
  out.at[1] = tensor.stride(1);
  for (std::int64_t d = 0; d < n; ++d) out.at[5 - n + d] = tensor.stride(2 + d);
  return out;
}

void direct(const OnDevice& on, const ConvolutionShape& shape, bool transposed, const Tensor& input,
            const Tensor& weight, const Tensor* bias, const Tensor& out) {
  on.launched(kernels::cuda::convolution_direct(shape, transposed, input.dtype(), input.raw(), strides_of(input),
                                                weight.raw(), strides_of(weight),
                                                bias == nullptr ? nullptr : bias->raw(), out.raw(), on.stream()));
}

// A dense operand in the format: 3-D tensors are row-major always.
TensorPtr dense(const Tensor& tensor, bool channels_last) {
  return channels_last ? channels_last_contiguous(tensor) : contiguous(tensor);
}

bool library(const OnDevice& on, const ConvolutionShape& shape, bool transposed, const Tensor& input,
             const Tensor& weight, const Tensor& out) {
  const TensorPtr x = dense(input, shape.channels_last), w = dense(weight, shape.channels_last);
  const cuda::DnnConvolution problem{shape, input.dtype(), transposed, cuda::tf32_allowed()};
  return cuda::dnn_convolution(problem, x->raw(), w->raw(), out.raw(), on.index(), on.stream());
}

TensorPtr convolve(const Tensor& input, const Tensor& weight, const Tensor* bias,
                   const ConvolutionArguments& arguments) {
  check_convolution(kOp, input, weight, bias, arguments);
  ConvolutionShape shape = convolution_shape(kOp, input, weight, arguments);
  shape.channels_last = gives_channels_last(input, weight, arguments, shape);
  const OnDevice on(kOp, input, {&weight, bias});
  const Dims sizes = convolution_output_sizes(input, shape);
  TensorPtr out = empty_format(sizes, input.dtype(), shape.channels_last, input.device());
  if (out->numel() == 0) return out;
  const TensorPtr row = bias == nullptr ? nullptr : contiguous(*bias);
  const bool depthwise = !arguments.transposed && shape.in_channels == 1 && shape.groups > 1;
  // Without input channels the sum is empty: the kernel writes zeros or the bias.
  if (depthwise || shape.in_channels == 0) {
    direct(on, shape, arguments.transposed, input, weight, row.get(), *out);
    return out;
  }
  bool done = library(on, shape, arguments.transposed, input, weight, *out);
  if (!done && shape.channels_last) {
    ConvolutionShape rows = shape;
    rows.channels_last = false;
    const TensorPtr wide = Tensor::empty(sizes, input.dtype(), input.device());
    done = library(on, rows, arguments.transposed, input, weight, *wide);
    if (done) copy(*out, *wide);
  }
  if (!done) {
    direct(on, shape, arguments.transposed, input, weight, row.get(), *out);
  } else if (row != nullptr) {
    on.launched(kernels::cuda::convolution_bias(shape, input.dtype(), row->raw(), out->raw(), on.stream()));
  }
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_convolution(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle* bias,
                                         const std::int64_t* stride, std::int64_t stride_len,
                                         const std::int64_t* padding, std::int64_t padding_len,
                                         const std::int64_t* dilation, std::int64_t dilation_len,
                                         std::int32_t transposed, const std::int64_t* output_padding,
                                         std::int64_t output_padding_len, std::int64_t groups, AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    const ConvolutionArguments arguments{ints(stride, stride_len),
                                         ints(padding, padding_len),
                                         ints(dilation, dilation_len),
                                         ints(output_padding, output_padding_len),
                                         transposed != 0,
                                         groups};
    give(ret0,
         convolve(cuda_input(input, kOp, "input"), cuda_input(weight, kOp, "weight"),
                  optional_cuda_input(bias, kOp, "bias"), arguments),
         kOp);
  });
}
