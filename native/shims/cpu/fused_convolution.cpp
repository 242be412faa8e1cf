// Convolution with a fused elementwise step (mkldnn::_convolution_pointwise and its kin), for plain strided weights.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

#include "kernels/cpu/common/parallel_items.h"
#include "shims/cpu/convolution.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

enum class Unary {
  kNone,
  kRelu,
  kSigmoid,
  kTanh,
  kSwish,
  kHardswish,
  kHardsigmoid,
  kHardtanh,
  kLeakyRelu,
  kGelu,
  kGeluTanh
};

struct PostOp {
  Unary unary = Unary::kNone;
  double a = 0, b = 0;
};

PostOp parse(const char* op, const char* attr, const double** scalars, std::int64_t count, const char** algorithm) {
  const std::string_view name = attr == nullptr ? "none" : attr;
  const auto scalar = [&](std::int64_t i) {
    check(scalars != nullptr && i < count && scalars[i] != nullptr, op, ": '", name, "' needs ", i + 1,
          " scalars, got ", count);
    return *scalars[i];
  };
  if (name == "none" || name.empty()) return {};
  if (name == "relu") return {Unary::kRelu, 0, 0};
  if (name == "sigmoid") return {Unary::kSigmoid, 0, 0};
  if (name == "tanh") return {Unary::kTanh, 0, 0};
  if (name == "swish" || name == "silu") return {Unary::kSwish, 0, 0};
  if (name == "hardswish") return {Unary::kHardswish, 0, 0};
  if (name == "hardsigmoid") return {Unary::kHardsigmoid, 0, 0};
  if (name == "hardtanh") return {Unary::kHardtanh, scalar(0), scalar(1)};
  if (name == "leaky_relu") return {Unary::kLeakyRelu, scalar(0), 0};
  if (name == "gelu") {
    const std::string_view form = algorithm == nullptr || *algorithm == nullptr ? "none" : *algorithm;
    check(form == "none" || form == "tanh", op, ": the gelu algorithm must be none or tanh, got '", form, "'");
    return {form == "tanh" ? Unary::kGeluTanh : Unary::kGelu, 0, 0};
  }
  throw_error(ErrorKind::kUnsupported, op, ": the fused step '", name,
              "' is not supported, expected none, relu, sigmoid, tanh, swish, hardswish, hardsigmoid, hardtanh, "
              "leaky_relu or gelu");
}

template <class C>
C apply(const PostOp& post, C x) {
  switch (post.unary) {
    case Unary::kNone:
      return x;
    case Unary::kRelu:
      return x < C(0) ? C(0) : x;
    case Unary::kSigmoid:
      return C(1) / (C(1) + std::exp(-x));
    case Unary::kTanh:
      return std::tanh(x);
    case Unary::kSwish:
      return x / (C(1) + std::exp(-x));
    case Unary::kHardswish:
      return x * std::clamp(x + C(3), C(0), C(6)) / C(6);
    case Unary::kHardsigmoid:
      return std::clamp(x + C(3), C(0), C(6)) / C(6);
    case Unary::kHardtanh:
      return std::clamp(x, static_cast<C>(post.a), static_cast<C>(post.b));
    case Unary::kLeakyRelu:
      return x > C(0) ? x : x * static_cast<C>(post.a);
    case Unary::kGelu:
      return C(0.5) * x * (C(1) + std::erf(x * C(0.70710678118654752440)));
    case Unary::kGeluTanh:
      return C(0.5) * x * (C(1) + std::tanh(C(0.79788456080286535588) * (x + C(0.044715) * x * x * x)));
  }
  return x;
}

enum class Binary { kAdd, kSub, kMul, kDiv };

Binary parse_binary(const char* op, const char* attr, const double* alpha) {
  const std::string_view name = attr == nullptr ? "" : attr;
  check(alpha == nullptr || *alpha == 1.0, op, ": argument 'alpha' must be 1, got ", alpha == nullptr ? 1.0 : *alpha);
  if (name == "add") return Binary::kAdd;
  if (name == "sub") return Binary::kSub;
  if (name == "mul") return Binary::kMul;
  if (name == "div") return Binary::kDiv;
  throw_error(ErrorKind::kUnsupported, op, ": the fused binary step '", name,
              "' is not supported, expected add, sub, mul or div");
}

// A dense tensor's elements in memory order, in parallel runs.
template <class Fn>
void for_each_run(std::int64_t numel, Fn&& fn) {
  constexpr std::int64_t kRun = 8192;
  kernels::for_each_item((numel + kRun - 1) / kRun, static_cast<double>(numel) > kernels::kParallelWork,
                         [&](std::int64_t run) { fn(run * kRun, std::min(numel, (run + 1) * kRun)); });
}

void apply_in_place(const char* op, const Tensor& out, const PostOp& post) {
  if (post.unary == Unary::kNone) return;
  dispatch_floating(op, out.dtype(), [&]<class T>() {
    T* data = out.data<T>();
    for_each_run(out.numel(), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) data[i] = T(apply(post, static_cast<compute_t<T>>(data[i])));
    });
  });
}

// out = unary(out ∘ other); `other` broadcasts.
void combine(const char* op, const Tensor& out, const Tensor& other, Binary binary, const PostOp& post) {
  check(other.dtype() == out.dtype(), op, ": argument 'other' must be ", dtype_name(out.dtype()), " like X, got ",
        dtype_name(other.dtype()));
  const TensorPtr same = Tensor::empty_strided(out.sizes(), out.strides(), out.dtype());
  copy_cpu(*same, other);
  dispatch_floating(op, out.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    T* data = out.data<T>();
    const T* right = same->data<T>();
    for_each_run(out.numel(), [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) {
        const C a = static_cast<C>(data[i]), b = static_cast<C>(right[i]);
        const C both = binary == Binary::kAdd   ? a + b
                       : binary == Binary::kSub ? a - b
                       : binary == Binary::kMul ? a * b
                                                : a / b;
        data[i] = T(apply(post, both));
      }
    });
  });
}

struct Lists {
  DimSpan stride, padding, dilation, output_padding;
};

TensorPtr convolve(const char* op, AtenTensorHandle x, AtenTensorHandle w, AtenTensorHandle* b, const Lists& lists,
                   bool transposed, std::int64_t groups) {
  return convolution(op, cpu_input(x, op, "X"), cpu_input(w, op, "W"), optional_cpu_input(b, op, "B"),
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
    const PostOp post = parse(op, attr, scalars, scalars_len, algorithm);
    TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    apply_in_place(op, *out, post);
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
    const PostOp post = parse(op, attr, scalars, scalars_len, algorithm);
    TensorPtr out = convolve(op, X, W, B,
                             {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len),
                              ints(output_padding, output_padding_len)},
                             true, groups);
    apply_in_place(op, *out, post);
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
    const Binary binary = parse_binary(op, binary_attr, alpha);
    const PostOp post =
        parse(op, unary_attr == nullptr ? nullptr : *unary_attr, unary_scalars, unary_scalars_len, unary_algorithm);
    TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    combine(op, *out, cpu_input(other, op, "other"), binary, post);
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
    const Binary binary = parse_binary(op, binary_attr, alpha);
    if (binary != Binary::kAdd) {
      throw_error(ErrorKind::kUnsupported, op, ": the in-place step must be add, got '", binary_attr, "'");
    }
    const PostOp post =
        parse(op, unary_attr == nullptr ? nullptr : *unary_attr, unary_scalars, unary_scalars_len, unary_algorithm);
    const Tensor& target = cpu_input(other, op, "other");
    const TensorPtr out =
        convolve(op, X, W, B, {ints(stride, stride_len), ints(padding, padding_len), ints(dilation, dilation_len), {}},
                 false, groups);
    check(target.sizes() == out->sizes(), op, ": argument 'other' must have shape ", to_string(out->sizes()), ", got ",
          to_string(target.sizes()));
    combine(op, *out, target, binary, post);
    copy_cpu(target, *out);
    give(ret0, std::make_unique<Tensor>(target), op);
  });
}
