// int8_linear: W8A8 linear layers on the CPU. CUDA has none.
#include <memory>
#include <optional>
#include <string_view>

#include "kernels/cpu/w8a8/int8.h"
#include "shims/activation.h"
#include "shims/destination.h"
#include "shims/matmul_checks.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

using kernels::ActivationRange;

struct Arguments {
  AtenTensorHandle x, weight, scale, column_sums;
  AtenTensorHandle *bias, *residual;
  const char* activation;
  std::int64_t out_features;
  const char* input_range;
  double input_scale;
  std::int64_t input_zero;
};

ActivationRange range_of(const char* op, const char* name) {
  const std::string_view wanted = name == nullptr ? "" : name;
  if (wanted == "asymmetric") return ActivationRange::kAsymmetric;
  if (wanted == "symmetric") return ActivationRange::kSymmetric;
  if (wanted == "static") return ActivationRange::kStatic;
  if (wanted == "tensor") return ActivationRange::kTensor;
  throw_error(ErrorKind::kUnsupported, op, ": input_range '", wanted,
              "' is not supported, expected asymmetric, symmetric, static or tensor");
}

kernels::ActivationType type_of(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::ActivationType::kBFloat16
         : dtype == DType::kFloat16 ? kernels::ActivationType::kFloat16
                                    : kernels::ActivationType::kFloat32;
}

// A vector beside the weight, an element for each of its padded outputs; one for each of `groups`, where the weight has
// some.
TensorPtr per_output(const char* op, const char* argument, const Tensor& tensor, DType dtype, std::int64_t groups,
                     std::int64_t padded) {
  const Dims expected = groups == 0 ? Dims{padded} : Dims{groups, padded};
  check(tensor.dtype() == dtype && tensor.sizes() == expected, op, ": argument '", argument, "' must be ",
        dtype_name(dtype), " of shape ", to_string(expected), ", got ", dtype_name(tensor.dtype()), " of shape ",
        to_string(tensor.sizes()));
  return contiguous(tensor);
}

// A matrix of rows; a copy of it where the leading dimensions do not fold.
struct Rows {
  TensorPtr tensor;
  std::int64_t stride;
};
Rows rows_of(const Tensor& x) {
  if (x.size(-1) <= 1 || x.stride(-1) == 1) {
    if (const auto stride = row_stride_of(x)) return {std::make_unique<Tensor>(x), *stride};
  }
  return {clone_contiguous(x), x.size(-1)};
}

TensorPtr int8_linear(const char* op, const Arguments& given, const Tensor* into) {
  const Tensor &x = cpu_input(given.x, op, "x"), &weight = cpu_input(given.weight, op, "weight"),
               &scale = cpu_input(given.scale, op, "scale"), &sums = cpu_input(given.column_sums, op, "column_sums");
  const Tensor* const bias = optional_cpu_input(given.bias, op, "bias");
  const Tensor* const residual = optional_cpu_input(given.residual, op, "residual");
  const DType dtype = x.dtype();
  check(is_floating(dtype) && dtype != DType::kFloat64, op, ": argument 'x' must be float32, bfloat16 or float16, got ",
        dtype_name(dtype));
  check(x.dim() >= 1, op, ": argument 'x' must have at least one dimension");
  const std::int64_t n = given.out_features, k = x.size(-1);
  check(n >= 0, op, ": out_features must not be negative, got ", n);
  check(k <= kernels::kInt8MaxK, op, ": argument 'x' has ", k, " features, the sums of more than ", kernels::kInt8MaxK,
        " do not fit int32");
  const std::int64_t panels = (n + kernels::kPackWidth - 1) / kernels::kPackWidth,
                     padded = panels * kernels::kPackWidth;
  const Dims expected{panels, (k + kernels::kInt8Group - 1) / kernels::kInt8Group, kernels::kPackWidth,
                      kernels::kInt8Group};
  check(weight.dtype() == DType::kInt8, op, ": argument 'weight' must be int8, got ", dtype_name(weight.dtype()));
  check(weight.sizes() == expected, op, ": argument 'weight' must have shape ", to_string(expected), " for ", k, " → ",
        n, " features, got ", to_string(weight.sizes()));
  kernels::Int8Linear p{};
  p.range = range_of(op, given.input_range);
  if (p.range == ActivationRange::kStatic) {
    check(given.input_scale > 0 && given.input_scale <= 3.4028234663852886e38, op,
          ": input_scale must be above 0 and finite, got ", given.input_scale);
    check(given.input_zero >= 0 && given.input_zero <= 255, op, ": input_zero must be 0 to 255, got ",
          given.input_zero);
    p.input_scale = static_cast<float>(given.input_scale);
    p.input_zero = static_cast<std::int32_t>(given.input_zero);
  }
  if (p.range == ActivationRange::kTensor) {
    check(given.input_scale >= 0x1p-126 && given.input_scale <= 3.4028234663852886e38, op,
          ": input_scale, the least scale, must be at least 2^-126 and finite, got ", given.input_scale);
    p.input_scale = static_cast<float>(given.input_scale);
  }
  p.epilogue = {activation_of(op, given.activation), false};
  const TensorPtr dense_weight = contiguous(weight);
  const std::int64_t groups = scale.dim() == 2 ? scale.size(0) : 0;
  check(scale.dim() != 2 || (groups >= 1 && k % (kernels::kInt8Group * groups) == 0), op, ": argument 'scale' has ",
        groups, " groups, which do not divide ", k, " features into multiples of ", kernels::kInt8Group);
  if (groups > 1) p.groups = groups;
  const TensorPtr dense_scale = per_output(op, "scale", scale, DType::kFloat32, groups, padded);
  const TensorPtr dense_sums = per_output(op, "column_sums", sums, DType::kInt32, groups, padded);
  TensorPtr dense_bias;
  if (bias != nullptr) {
    check_bias(op, *bias, n, dtype);
    dense_bias = contiguous(*bias);
  }
  Dims sizes = x.sizes();
  sizes[sizes.size() - 1] = n;
  Rows added{};
  if (residual != nullptr) {
    check(residual->dtype() == dtype && residual->sizes() == sizes, op, ": argument 'residual' must be ",
          dtype_name(dtype), " of shape ", to_string(sizes), ", got ", dtype_name(residual->dtype()), " of shape ",
          to_string(residual->sizes()));
    added = rows_of(*residual);
  }
  const Rows rows = rows_of(x);
  TensorPtr out = destination(op, into, sizes, dtype, x.device());
  p.m = rows_before_last(x), p.n = n, p.k = k;
  p.x = rows.tensor->raw(), p.x_stride = rows.stride, p.type = type_of(dtype);
  p.weight = dense_weight->data<std::int8_t>();
  p.scale = dense_scale->data<float>(), p.column_sums = dense_sums->data<std::int32_t>();
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->raw();
  p.residual = residual == nullptr ? nullptr : added.tensor->raw(), p.ldr = added.stride;
  p.out = out->raw();
  kernels::int8_linear(p);
  return out;
}

}  // namespace

// activation(quantized x · weightᵀ + bias) + residual, x, bias and residual of one dtype; see kernels/cpu/w8a8/int8.h.
UNTORCH_SHIM aoti_torch_cpu_int8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale,
                                        AtenTensorHandle column_sums, AtenTensorHandle* bias,
                                        AtenTensorHandle* residual, const char* activation, std::int64_t out_features,
                                        const char* input_range, double input_scale, std::int64_t input_zero,
                                        AtenTensorHandle* ret0) {
  constexpr const char* op = "int8_linear";
  return guarded(op, [&] {
    check(ret0 != nullptr, op, ": output pointer is null");
    give(ret0,
         int8_linear(op,
                     {x, weight, scale, column_sums, bias, residual, activation, out_features, input_range, input_scale,
                      input_zero},
                     nullptr),
         op);
  });
}

// The same into memory of the caller.
UNTORCH_SHIM untorch_int8_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                 AtenTensorHandle scale, AtenTensorHandle column_sums, AtenTensorHandle* bias,
                                 AtenTensorHandle* residual, const char* activation, std::int64_t out_features,
                                 const char* input_range, double input_scale, std::int64_t input_zero) {
  constexpr const char* op = "int8_linear";
  return guarded(op, [&] {
    (void)int8_linear(
        op,
        {x, weight, scale, column_sums, bias, residual, activation, out_features, input_range, input_scale, input_zero},
        &cpu_input(out, op, "out"));
  });
}
