// Convolution with a fused epilogue on the CPU: mkldnn::_convolution_pointwise and its variants, for plain strided
// weights.
#include <string_view>

#include "shims/convolution.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::ConvolutionEpilogue;
using kernels::FusedBinary;
using kernels::FusedUnary;

ConvolutionEpilogue parse_activation(const char* op, const char* attr, const double** scalars, std::int64_t count,
                                     const char** algorithm) {
  const std::string_view name = attr == nullptr ? "none" : attr;
  const auto scalar = [&](std::int64_t i) {
    check(scalars != nullptr && i < count && scalars[i] != nullptr, op, ": '", name, "' needs ", i + 1,
          " scalars, got ", count);
    return *scalars[i];
  };
  if (name == "none" || name.empty()) return {};
  if (name == "relu") return {FusedUnary::kRelu, 0, 0};
  if (name == "sigmoid") return {FusedUnary::kSigmoid, 0, 0};
  if (name == "tanh") return {FusedUnary::kTanh, 0, 0};
  if (name == "swish" || name == "silu") return {FusedUnary::kSwish, 0, 0};
  if (name == "hardswish") return {FusedUnary::kHardswish, 0, 0};
  if (name == "hardsigmoid") return {FusedUnary::kHardsigmoid, 0, 0};
  if (name == "hardtanh") return {FusedUnary::kHardtanh, scalar(0), scalar(1)};
  if (name == "leaky_relu") return {FusedUnary::kLeakyRelu, scalar(0), 0};
  if (name == "gelu") {
    const std::string_view form = algorithm == nullptr || *algorithm == nullptr ? "none" : *algorithm;
    check(form == "none" || form == "tanh", op, ": the gelu algorithm must be none or tanh, got '", form, "'");
    return {form == "tanh" ? FusedUnary::kGeluTanh : FusedUnary::kGelu, 0, 0};
  }
  throw_error(ErrorKind::kUnsupported, op, ": the fused step '", name,
              "' is not supported, expected none, relu, sigmoid, tanh, swish, hardswish, hardsigmoid, hardtanh, "
              "leaky_relu or gelu");
}

FusedBinary parse_binary(const char* op, const char* attr, const double* alpha) {
  const std::string_view name = attr == nullptr ? "" : attr;
  check(alpha == nullptr || *alpha == 1.0, op, ": argument 'alpha' must be 1, got ", alpha == nullptr ? 1.0 : *alpha);
  if (name == "add") return FusedBinary::kAdd;
  if (name == "sub") return FusedBinary::kSub;
  if (name == "mul") return FusedBinary::kMul;
  if (name == "div") return FusedBinary::kDiv;
  throw_error(ErrorKind::kUnsupported, op, ": the fused binary step '", name,
              "' is not supported, expected add, sub, mul or div");
}

ConvolutionEpilogue parse_epilogue(const char* op, const char* binary, const double* alpha, const char** activation,
                                   const double** scalars, std::int64_t count, const char** algorithm) {
  const FusedBinary step = parse_binary(op, binary, alpha);
  ConvolutionEpilogue out =
      parse_activation(op, activation == nullptr ? nullptr : *activation, scalars, count, algorithm);
  out.binary = step;
  return out;
}

void apply_in_place(const Tensor& out, const ConvolutionEpilogue& epilogue) {
  kernels::cpu::convolution_epilogue(epilogue, out.dtype(), out.numel(), nullptr, out.raw());
}

// out = activation(out ∘ other); `other` broadcasts.
void combine(const char* op, const Tensor& out, const Tensor& other, const ConvolutionEpilogue& epilogue) {
  check(other.dtype() == out.dtype(), op, ": argument 'other' must be ", dtype_name(out.dtype()), " like X, got ",
        dtype_name(other.dtype()));
  const TensorPtr same = Tensor::empty_strided(out.sizes(), out.strides(), out.dtype());
  copy_cpu(*same, other);
  kernels::cpu::convolution_epilogue(epilogue, out.dtype(), out.numel(), same->raw(), out.raw());
}

struct Lists {
  DimSpan stride, padding, dilation, output_padding;
};

TensorPtr convolve(const char* op, AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* b, const Lists& lists,
                   bool transposed, std::int64_t groups) {
  return convolution(Op{op}, cpu_input(x, op, "X"), cpu_input(w, op, "W"), optional_cpu_input(b, op, "B"),
                     {lists.stride, lists.padding, lists.dilation, lists.output_padding, transposed, groups});
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_mkldnn__convolution_pointwise(AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle* B,
                                                          const std::int64_t* padding, std::int64_t padding_len,
                                                          const std::int64_t* stride, std::int64_t stride_len,
                                                          const std::int64_t* dilation, std::int64_t dilation_len,
                                                          std::int64_t groups, const char* attr, const double** scalars,
                                                          std::int64_t scalars_len, const char** algorithm,
                                                          AtenTensorHandle* ret0) {
  constexpr const char* op = "mkldnn::_convolution_pointwise";
  return guarded(op, [&] {
    const ConvolutionEpilogue epilogue = parse_activation(op, attr, scalars, scalars_len, algorithm);
    TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    apply_in_place(*out, epilogue);
    give(ret0, std::move(out), op);
  });
}

// W is [in, out/groups, kernel…], the shape of a transposed convolution's weight.
UNTORCH_SHIM aoti_torch_cpu_mkldnn__convolution_transpose_pointwise(
    AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle* B, const std::int64_t* padding, std::int64_t padding_len,
    const std::int64_t* output_padding, std::int64_t output_padding_len, const std::int64_t* stride,
    std::int64_t stride_len, const std::int64_t* dilation, std::int64_t dilation_len, std::int64_t groups,
    const char* attr, const double** scalars, std::int64_t scalars_len, const char** algorithm,
    AtenTensorHandle* ret0) {
  constexpr const char* op = "mkldnn::_convolution_transpose_pointwise";
  return guarded(op, [&] {
    const ConvolutionEpilogue epilogue = parse_activation(op, attr, scalars, scalars_len, algorithm);
    TensorPtr out = convolve(op, X, W, B,
                             {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len),
                              ints(output_padding, output_padding_len)},
                             true, groups);
    apply_in_place(*out, epilogue);
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu_mkldnn__convolution_pointwise_binary(
    AtenTensorHandle X, AtenTensorHandle other, AtenTensorHandle W, AtenTensorHandle* B, const std::int64_t* padding,
    std::int64_t padding_len, const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* dilation,
    std::int64_t dilation_len, std::int64_t groups, const char* binary_attr, double* alpha, const char** unary_attr,
    const double** unary_scalars, std::int64_t unary_scalars_len, const char** unary_algorithm,
    AtenTensorHandle* ret0) {
  constexpr const char* op = "mkldnn::_convolution_pointwise.binary";
  return guarded(op, [&] {
    const ConvolutionEpilogue epilogue =
        parse_epilogue(op, binary_attr, alpha, unary_attr, unary_scalars, unary_scalars_len, unary_algorithm);
    TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    combine(op, *out, cpu_input(other, op, "other"), epilogue);
    give(ret0, std::move(out), op);
  });
}

// Writes into `other`; the return value is another handle on it.
UNTORCH_SHIM aoti_torch_cpu_mkldnn__convolution_pointwise_binary_(
    AtenTensorHandle other, AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle* B, const std::int64_t* padding,
    std::int64_t padding_len, const std::int64_t* stride, std::int64_t stride_len, const std::int64_t* dilation,
    std::int64_t dilation_len, std::int64_t groups, const char* binary_attr, double* alpha, const char** unary_attr,
    const double** unary_scalars, std::int64_t unary_scalars_len, const char** unary_algorithm,
    AtenTensorHandle* ret0) {
  constexpr const char* op = "mkldnn::_convolution_pointwise_.binary";
  return guarded(op, [&] {
    const ConvolutionEpilogue epilogue =
        parse_epilogue(op, binary_attr, alpha, unary_attr, unary_scalars, unary_scalars_len, unary_algorithm);
    if (epilogue.binary != FusedBinary::kAdd) {
      throw_error(ErrorKind::kUnsupported, op, ": the in-place step must be add, got '", binary_attr, "'");
    }
    const Tensor& target = cpu_input(other, op, "other");
    const TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    check(target.sizes() == out->sizes(), op, ": argument 'other' must have shape ", to_string(out->sizes()), ", got ",
          to_string(target.sizes()));
    combine(op, *out, target, epilogue);
    copy_cpu(target, *out);
    give(ret0, std::make_unique<Tensor>(target), op);
  });
}
