// Linear layers on the CPU: untorch's packed operator, and Inductor's _linear_pointwise and _mkl_linear on plain
// weights. CUDA has none of them.
#include <string_view>
#include <type_traits>
#include <utility>

#include "shims/activation.h"
#include "shims/gemm.h"

namespace untorch::shims {
namespace {

using kernels::Activation;
using kernels::cpu::BinaryPostOp;
using kernels::cpu::post_op;
using kernels::cpu::PostOp;

// x [..., k] seen as a matrix of rows; a row-major copy of it where the leading dimensions do not fold or k is strided.
struct Rows {
  TensorPtr tensor;
  std::int64_t rows, stride;
};
Rows fold_rows(const Tensor& x) {
  const std::int64_t rows = rows_before_last(x), k = x.size(-1);
  if (k <= 1 || x.stride(-1) == 1) {
    if (const auto stride = row_stride_of(x)) return {std::make_unique<Tensor>(x), rows, *stride};
  }
  return {clone_contiguous(x), rows, k};
}

Dims with_last(const Dims& sizes, std::int64_t last) {
  Dims out = sizes;
  out[out.size() - 1] = last;
  return out;
}

double scalar_at(const char* op, const char* attr, const double** scalars, std::int64_t count, std::int64_t index) {
  check(scalars != nullptr && index < count && scalars[index] != nullptr, op, ": '", attr, "' needs ", index + 1,
        " scalars, got ", count);
  return *scalars[index];
}

// The post-ops of oneDNN that Inductor fuses.
void apply_attribute(const char* op, float* values, std::int64_t rows, std::int64_t cols, std::string_view attr,
                     const double** scalars, std::int64_t scalar_count, const char** algorithm) {
  const auto activate = [&](Activation activation) { kernels::apply_activation(rows, cols, activation, values, cols); };
  const std::int64_t count = rows * cols;
  if (attr == "none") return;
  if (attr == "relu") return activate(Activation::kRelu);
  if (attr == "sigmoid") return activate(Activation::kSigmoid);
  if (attr == "tanh") return activate(Activation::kTanh);
  if (attr == "swish") return activate(Activation::kSilu);
  if (attr == "gelu") {
    const std::string_view form = algorithm == nullptr || *algorithm == nullptr ? "none" : *algorithm;
    check(form == "none" || form == "tanh", op, ": gelu's algorithm must be none or tanh, got '", form, "'");
    return activate(form == "tanh" ? Activation::kGeluTanh : Activation::kGelu);
  }
  if (attr == "hardswish") {
    return post_op(PostOp::kHardswish, count, 0, 0, values);
  }
  if (attr == "leaky_relu") {
    const auto slope = static_cast<float>(scalar_at(op, "leaky_relu", scalars, scalar_count, 0));
    return post_op(PostOp::kLeakyRelu, count, slope, 0, values);
  }
  if (attr == "hardtanh") {
    const auto low = static_cast<float>(scalar_at(op, "hardtanh", scalars, scalar_count, 0));
    const auto high = static_cast<float>(scalar_at(op, "hardtanh", scalars, scalar_count, 1));
    return post_op(PostOp::kHardtanh, count, low, high, values);
  }
  throw_error(ErrorKind::kUnsupported, op, ": post-op '", attr,
              "' is not supported, expected none, relu, sigmoid, tanh, gelu, swish, hardswish, leaky_relu or hardtanh");
}

// x·Wᵀ + bias, as float32 for what follows, row-major, W [n, k] of any strides.
TensorPtr plain_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor* bias) {
  check(x.dim() >= 1, op, ": argument 'X' must have at least one dimension");
  check_rank(op, "W", weight, 2);
  check(is_floating(x.dtype()) && x.dtype() != DType::kFloat64, op,
        ": argument 'X' must be float32, bfloat16 or float16, got ", dtype_name(x.dtype()));
  check(x.dtype() == weight.dtype(), op, ": 'X' and 'W' must have the same dtype, got ", dtype_name(x.dtype()), " and ",
        dtype_name(weight.dtype()));
  check(x.size(-1) == weight.size(1), op, ": 'X' has ", x.size(-1), " features, 'W' of shape ",
        to_string(weight.sizes()), " takes ", weight.size(1));
  const Rows rows = fold_rows(x);
  const std::int64_t n = weight.size(0), k = weight.size(1);
  TensorPtr out = Tensor::empty(with_last(x.sizes(), n), x.dtype());
  if (bias != nullptr) {
    check(bias->dim() == 1 && bias->size(0) == n, op, ": argument 'B' must have shape [", n, "], got ",
          to_string(bias->sizes()));
    copy(*out, *bias);
  }
  const kernels::Matrix a{rows.tensor->raw(), x.dtype(), 1, rows.rows, k, 0, rows.stride, 1};
  const kernels::Matrix b = matrix_of(weight).transposed();
  const kernels::Matrix c{out->raw(), x.dtype(), 1, rows.rows, n, 0, n, 1};
  kernels::cpu::gemm(a, b, c, 1.0, bias == nullptr ? 0.0 : 1.0);
  return to_dtype(*out, DType::kFloat32);
}

std::int64_t row_count(const Tensor& out) { return out.size(-1) == 0 ? 0 : out.numel() / out.size(-1); }

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__linear_pointwise(AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle* B,
                                              const char* attr, const double** scalars, std::int64_t scalars_len_,
                                              const char** algorithm, AtenTensorHandle* ret0) {
  constexpr const char* op = "_linear_pointwise";
  return guarded(op, [&] {
    const Tensor& x = cpu_input(X, op, "X");
    TensorPtr out = plain_linear(op, x, cpu_input(W, op, "W"), optional_cpu_input(B, op, "B"));
    apply_attribute(op, out->data<float>(), row_count(*out), out->size(-1), attr == nullptr ? "none" : attr, scalars,
                    scalars_len_, algorithm);
    give(ret0, to_dtype(*out, x.dtype()), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu__linear_pointwise_binary(AtenTensorHandle X, AtenTensorHandle other, AtenTensorHandle W,
                                                     AtenTensorHandle* B, const char* attr, AtenTensorHandle* ret0) {
  constexpr const char* op = "_linear_pointwise_binary";
  return guarded(op, [&] {
    const Tensor& x = cpu_input(X, op, "X");
    const Tensor& second = cpu_input(other, op, "other");
    const TensorPtr out = plain_linear(op, x, cpu_input(W, op, "W"), optional_cpu_input(B, op, "B"));
    check(second.sizes() == out->sizes(), op, ": argument 'other' must have shape ", to_string(out->sizes()), ", got ",
          to_string(second.sizes()));
    check(second.dtype() == x.dtype(), op, ": argument 'other' must be ", dtype_name(x.dtype()), ", got ",
          dtype_name(second.dtype()));
    const TensorPtr wide = to_dtype(second, DType::kFloat32);
    const TensorPtr dense = contiguous(*wide);
    const std::string_view name = attr == nullptr ? "add" : attr;
    const auto combine = [&](BinaryPostOp kind) {
      post_op(kind, out->numel(), dense->data<float>(), out->data<float>());
    };
    if (name == "add") {
      combine(BinaryPostOp::kAdd);
    } else if (name == "sub") {
      combine(BinaryPostOp::kSub);
    } else if (name == "mul") {
      combine(BinaryPostOp::kMul);
    } else {
      throw_error(ErrorKind::kUnsupported, op, ": binary post-op '", name,
                  "' is not supported, expected add, sub or mul");
    }
    give(ret0, to_dtype(*out, x.dtype()), op);
  });
}

// W is MKL's packed form of origin_W, good for one batch size only; origin_W serves every batch, so W is not read.
UNTORCH_SHIM aoti_torch_cpu__mkl_linear(AtenTensorHandle X, AtenTensorHandle W, AtenTensorHandle origin_W,
                                        AtenTensorHandle* B, std::int64_t prepack_batch_size, AtenTensorHandle* ret0) {
  constexpr const char* op = "_mkl_linear";
  (void)W, (void)prepack_batch_size;
  return guarded(op, [&] {
    const Tensor& x = cpu_input(X, op, "X");
    check(x.dtype() == DType::kFloat32, op, ": argument 'X' must be float32, got ", dtype_name(x.dtype()));
    give(ret0, plain_linear(op, x, cpu_input(origin_W, op, "origin_W"), optional_cpu_input(B, op, "B")), op);
  });
}

// activation(x·Wᵀ + bias) + residual, all of one dtype: x [..., k], bias [n], residual [..., n]; weight packed,
// [ceil(n/16), k, 16] in float32, [ceil(n/16), ceil(k/2), 16, 2] in the half types.
UNTORCH_SHIM aoti_torch_cpu_untorch_packed_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                                  AtenTensorHandle* residual, const char* activation,
                                                  std::int64_t out_features, AtenTensorHandle* ret0) {
  constexpr const char* op = "packed_linear";
  return guarded(op, [&] {
    const Tensor& input = cpu_input(x, op, "x");
    const Tensor& packed = cpu_input(weight, op, "weight");
    const Tensor* added = optional_cpu_input(bias, op, "bias");
    const Tensor* rest = optional_cpu_input(residual, op, "residual");
    const Activation function = activation_of(op, activation);
    const DType dtype = input.dtype();
    const bool half = dtype == DType::kBFloat16 || dtype == DType::kFloat16;
    check(half || dtype == DType::kFloat32, op, ": argument 'x' must be float32, bfloat16 or float16, got ",
          dtype_name(dtype));
    const auto check_same = [&](const Tensor& tensor, const char* name) {
      check(tensor.dtype() == dtype, op, ": argument '", name, "' must be ", dtype_name(dtype), ", as 'x', got ",
            dtype_name(tensor.dtype()));
    };
    check_same(packed, "weight");
    check(input.dim() >= 1, op, ": argument 'x' must have at least one dimension");
    check(out_features >= 0, op, ": out_features must not be negative, got ", out_features);
    const std::int64_t n = out_features, k = input.size(-1),
                       panels = (n + kernels::kPackWidth - 1) / kernels::kPackWidth;
    const Dims expected =
        half ? Dims{panels, (k + 1) / 2, kernels::kPackWidth, 2} : Dims{panels, k, kernels::kPackWidth};
    check(packed.sizes() == expected, op, ": argument 'weight' must have shape ", to_string(expected), " for ", k,
          " → ", n, " features, got ", to_string(packed.sizes()));
    const TensorPtr dense_weight = contiguous(packed);
    const Dims sizes = with_last(input.sizes(), n);
    TensorPtr dense_bias;
    if (added != nullptr) {
      check_same(*added, "bias");
      check(added->dim() == 1 && added->size(0) == n, op, ": argument 'bias' must have shape [", n, "], got ",
            to_string(added->sizes()));
      dense_bias = contiguous(*added);
    }
    Rows dense_residual{};
    if (rest != nullptr) {
      check_same(*rest, "residual");
      check(rest->sizes() == sizes, op, ": argument 'residual' must have shape ", to_string(sizes), ", got ",
            to_string(rest->sizes()));
      dense_residual = fold_rows(*rest);
    }
    const Rows rows = fold_rows(input);
    TensorPtr out = Tensor::empty(sizes, dtype);
    const auto run = [&]<class T>(std::type_identity<T>, auto&& gemm) {
      gemm(rows.rows, n, k, rows.tensor->data<T>(), rows.stride, dense_weight->data<T>(),
           dense_bias ? dense_bias->data<T>() : nullptr, kernels::Epilogue{function, false},
           rest != nullptr ? dense_residual.tensor->data<T>() : nullptr, dense_residual.stride, out->data<T>(), n);
    };
    if (half) {
      const auto type = dtype == DType::kBFloat16 ? kernels::HalfType::kBFloat16 : kernels::HalfType::kFloat16;
      run(std::type_identity<std::uint16_t>{}, [type](auto... args) { kernels::gemm_half_packed(type, args...); });
    } else {
      run(std::type_identity<float>{}, [](auto... args) { kernels::gemm_packed(args...); });
    }
    give(ret0, std::move(out), op);
  });
}

}  // namespace untorch::shims
