// w4a8_linear: linear layers with int4 weights and int8 activations on the CPU. CUDA has none.
#include "kernels/cpu/w4a8/w4a8.h"
#include "shims/destination.h"
#include "shims/int4_linear.h"
#include "shims/matmul_checks.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "w4a8_linear";

// In float32, whatever x's dtype.
TensorPtr w4a8_linear(AtenTensorHandle x_handle, AtenTensorHandle weight_handle, AtenTensorHandle scale_handle,
                      std::int64_t group, std::int64_t n, AtenTensorHandle* bias_handle, const Tensor* into) {
  const Tensor &x = cpu_input(x_handle, kOp, "x"), &weight = cpu_input(weight_handle, kOp, "weight"),
               &scales = cpu_input(scale_handle, kOp, "scale_and_zero");
  const Tensor* const bias = optional_cpu_input(bias_handle, kOp, "bias");
  check_float_rows(kOp, "x", x);
  check(n >= 0, kOp, ": out_features must not be negative, got ", n);
  check(group == 32 || group == 64 || group == 128 || group == 256, kOp,
        ": argument 'group_size' must be 32, 64, 128 or 256, got ", group);
  const std::int64_t width = x.size(-1), panels = (n + kernels::kW4A8Columns - 1) / kernels::kW4A8Columns;
  const std::int64_t k = (width + group - 1) / group * group;
  const auto check_packed = [&](const char* argument, const Tensor& tensor, const Dims& sizes) {
    check(tensor.sizes() == sizes && tensor.is_contiguous(), kOp, ": argument '", argument,
          "' must be contiguous of shape ", to_string(sizes), " for ", width, " features, ", n,
          " outputs and groups of ", group, ", got shape ", to_string(tensor.sizes()), " with strides ",
          to_string(tensor.strides()));
  };
  check(weight.dtype() == DType::kInt32, kOp, ": argument 'weight' must be int32, got ", dtype_name(weight.dtype()));
  check_packed("weight", weight, {panels, k / 8, kernels::kW4A8Columns});
  check(is_floating(scales.dtype()) && scales.dtype() != DType::kFloat64, kOp,
        ": argument 'scale_and_zero' must be float32, bfloat16 or float16, got ", dtype_name(scales.dtype()));
  check_packed("scale_and_zero", scales, {panels, k / group, 2, kernels::kW4A8Columns});
  if (bias != nullptr) check_bias(kOp, *bias, n, x.dtype());

  const FloatRows rows = float_rows(x);
  const TensorPtr dense_bias = float_bias(bias);
  Dims sizes = x.sizes();
  sizes[sizes.size() - 1] = n;
  TensorPtr out = Tensor::empty(sizes, DType::kFloat32);
  kernels::W4A8Linear p;
  p.m = rows_before_last(x), p.n = n, p.k = k;
  p.x = rows.tensor->data<float>(), p.x_width = width, p.x_stride = rows.stride;
  p.weight = weight.data<std::int32_t>();
  p.scales = scales.raw(), p.scale_type = scale_type_of(scales.dtype()), p.group = group;
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->data<float>();
  p.out = out->data<float>();
  kernels::w4a8_linear(p);
  return delivered(kOp, into, to_dtype(*out, x.dtype()));
}

}  // namespace

// out = quantized x [.., k] · weightᵀ + bias, for float32, bfloat16 and float16; see kernels/cpu/w4a8/w4a8.h.
UNTORCH_SHIM aoti_torch_cpu_w4a8_linear(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero,
                                        std::int64_t group_size, std::int64_t out_features, AtenTensorHandle* bias,
                                        AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    check(ret0 != nullptr, kOp, ": output pointer is null");
    give(ret0, w4a8_linear(x, weight, scale_and_zero, group_size, out_features, bias, nullptr), kOp);
  });
}

// The same into memory of the caller.
UNTORCH_SHIM untorch_w4a8_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                 AtenTensorHandle scale_and_zero, std::int64_t group_size, std::int64_t out_features,
                                 AtenTensorHandle* bias) {
  return guarded(kOp, [&] {
    (void)w4a8_linear(x, weight, scale_and_zero, group_size, out_features, bias, &cpu_input(out, kOp, "out"));
  });
}
