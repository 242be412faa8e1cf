// int4_linear and _weight_int4pack_mm: W4A16 linear layers with int4 weights.
#include "shims/int4_linear.h"

#include <memory>
#include <optional>
#include <utility>

#include "cuda/kernel_registry.h"
#include "shims/dequantize.h"
#include "shims/destination.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_dense(const char* op, const char* argument, const Tensor& tensor) {
  check(tensor.is_contiguous(), op, ": argument '", argument, "' must be contiguous, got shape ",
        to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

}  // namespace

namespace untorch::shims {

Int4Shape check_int4_weight(const char* op, const Int4Names& names, const Tensor& weight, std::int64_t group,
                            const Tensor& scales) {
  check(weight.dtype() == DType::kInt32, op, ": argument '", names.weight, "' must be int32, got ",
        dtype_name(weight.dtype()));
  check(weight.dim() == 4 && weight.size(2) == 32, op, ": argument '", names.weight,
        "' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape ", to_string(weight.sizes()));
  const std::int64_t words = weight.size(3);
  check(words == 1 || words == 2 || words == 4, op, ": argument '", names.weight,
        "' must have 1, 2 or 4 in its last dimension (inner_k_tiles 2, 4 or 8), got shape ", to_string(weight.sizes()));
  check_dense(op, names.weight, weight);
  Int4Shape out;
  out.n = weight.size(0) * 8;
  out.k = weight.size(1) * words * 32;
  out.group = group;
  out.inner_k_tiles = static_cast<int>(words * 2);
  check(group == 32 || group == 64 || group == 128 || group == 256, op, ": argument '", names.group,
        "' must be 32, 64, 128 or 256, got ", group);
  check(out.k > 0 && out.k % group == 0, op, ": argument '", names.group, "' must divide k, got ", group,
        " for a weight of k = ", out.k);
  const Dims expected{out.k / group, out.n, 2};
  check(scales.sizes() == expected, op, ": argument '", names.scales, "' must have shape ", to_string(expected),
        " (groups, columns, scale and zero), got ", to_string(scales.sizes()));
  check_dense(op, names.scales, scales);
  return out;
}

}  // namespace untorch::shims

namespace {

bool is_served(DType dtype) { return is_floating(dtype) && dtype != DType::kFloat64; }

// aten::_weight_int4pack_mm: x bfloat16 [m, k], dense; weight int32 [n/8][k/(16·t)][32][t/2], dense; scales bfloat16
// [k/group][n][2], dense. Looks at no device.
[[maybe_unused]] Int4Shape check_int4pack(const char* op, const Tensor& x, const Tensor& weight, std::int64_t group,
                                          const Tensor& scales) {
  check(x.dtype() == DType::kBFloat16, op, ": argument 'self' must be bfloat16, got ", dtype_name(x.dtype()));
  check(x.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(x.sizes()));
  check_dense(op, "self", x);
  Int4Shape out = check_int4_weight(op, {"mat2", "qGroupSize", "qScaleAndZeros"}, weight, group, scales);
  check(scales.dtype() == DType::kBFloat16, op, ": argument 'qScaleAndZeros' must be bfloat16, got ",
        dtype_name(scales.dtype()));
  check(x.size(1) == out.k, op, ": the inner sizes differ: 'self' is ", to_string(x.sizes()), ", 'mat2' of shape ",
        to_string(weight.sizes()), " holds k = ", out.k);
  out.m = x.size(0);
  out.x_width = out.k;
  out.out_sizes = Dims{out.m, out.n};
  return out;
}

// The weight and its scales alone, as int4_linear takes them.
Int4Shape check_linear_weight(const char* op, const Tensor& weight, const Tensor& scales, std::int64_t group) {
  Int4Shape out = check_int4_weight(op, {"weight", "group_size", "scale_and_zero"}, weight, group, scales);
  check(is_served(scales.dtype()), op, ": argument 'scale_and_zero' must be float32, bfloat16 or float16, got ",
        dtype_name(scales.dtype()));
  return out;
}

// x float32, bfloat16 or float16 [.., x_width] with a dense last dimension, x_width <= k; scales of any of these
// dtypes; bias null or [n] of x's dtype, any stride.
Int4Shape check_int4_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scales,
                            std::int64_t group, const Tensor* bias) {
  check_float_rows(op, "x", x);
  Int4Shape out = check_linear_weight(op, weight, scales, group);
  check(x.size(-1) <= out.k, op, ": argument 'x' has ", x.size(-1), " features, 'weight' of shape ",
        to_string(weight.sizes()), " takes at most k = ", out.k);
  if (bias != nullptr) check_bias(op, *bias, out.n, x.dtype());
  out.x_width = x.size(-1);
  out.m = rows_before_last(x);
  out.out_sizes = x.sizes();
  out.out_sizes[out.out_sizes.size() - 1] = out.n;
  return out;
}

// In float32, whatever x's dtype.
TensorPtr int4_linear_cpu(const Tensor& x, const Tensor& weight, const Tensor& scales, const Tensor* bias,
                          const Int4Shape& shape) {
  const FloatRows rows = float_rows(x);
  const TensorPtr dense_bias = float_bias(bias);
  TensorPtr out = Tensor::empty(shape.out_sizes, DType::kFloat32);
  kernels::Int4Linear p;
  p.m = shape.m, p.n = shape.n, p.k = shape.k;
  p.x = rows.tensor->data<float>(), p.x_width = shape.x_width, p.x_stride = rows.stride;
  p.weight = weight.data<std::int32_t>(), p.inner_k_tiles = shape.inner_k_tiles;
  p.scales = scales.raw(), p.scale_type = scale_type_of(scales.dtype()), p.group = shape.group;
  p.bias = dense_bias == nullptr ? nullptr : dense_bias->data<float>();
  p.out = out->data<float>();
  kernels::int4_linear(p);
  return to_dtype(*out, x.dtype());
}

}  // namespace

namespace untorch::shims {

kernels::ScaleType scale_type_of(DType dtype) {
  return dtype == DType::kBFloat16  ? kernels::ScaleType::kBFloat16
         : dtype == DType::kFloat16 ? kernels::ScaleType::kFloat16
                                    : kernels::ScaleType::kFloat32;
}

TensorPtr float_bias(const Tensor* bias) {
  return bias == nullptr ? nullptr : contiguous(*to_dtype(*bias, DType::kFloat32));
}

TensorPtr dequantize_int4(const char* what, const Tensor& weight, const Tensor& scale_and_zero, std::int64_t group_size,
                          DType dtype) {
  const Op op{what, DeviceType::kCUDA};
  const Int4Shape shape = check_linear_weight(op, weight, scale_and_zero, group_size);
  TensorPtr out;
  run(
      op, {&weight, &scale_and_zero},
      [&] { throw_error(ErrorKind::kUnsupported, op, ": dequantize_weights: ", cuda::kBuiltWithoutCuda); },
      [&](const auto& on) { out = dequantize_int4_cuda(op, on, weight, scale_and_zero, shape, dtype); });
  return out;
}

}  // namespace untorch::shims

namespace {

// out = x [.., k_in] · weightᵀ + bias, for float32, bfloat16 and float16. `into` null: new memory.
TensorPtr int4_linear(const Op& op, AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero,
                      std::int64_t group_size, AtenTensorHandle* bias, const Tensor* into) {
  const Tensor &input = op.input(x, "x"), &packed = op.input(weight, "weight"),
               &scales = op.input(scale_and_zero, "scale_and_zero");
  const Tensor* const bias_or_null = op.optional_input(bias, "bias");
  const Int4Shape shape = check_int4_linear(op, input, packed, scales, group_size, bias_or_null);
  TensorPtr out;
  run(
      op, {&input, &packed, &scales, bias_or_null},
      [&] { out = delivered(op, into, int4_linear_cpu(input, packed, scales, bias_or_null, shape)); },
      [&](const auto& on) { out = int4_linear_cuda(op, on, input, packed, scales, bias_or_null, shape, into); });
  return out;
}

}  // namespace

UNTORCH_OP(int4_linear,
           (AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale_and_zero, std::int64_t group_size,
            AtenTensorHandle* bias, AtenTensorHandle* ret0),
           x, weight, scale_and_zero, group_size, bias, ret0) {
  check(ret0 != nullptr, op, ": output pointer is null");
  give(ret0, int4_linear(op, x, weight, scale_and_zero, group_size, bias, nullptr), op);
}

// The same into memory of the caller, on the device of x.
UNTORCH_SHIM untorch_int4_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                 AtenTensorHandle scale_and_zero, std::int64_t group_size, AtenTensorHandle* bias) {
  return guarded("int4_linear", [&] {
    const Op op = Op::of("int4_linear", x, "x");
    const FromTorch relaxed(op);
    (void)int4_linear(op, x, weight, scale_and_zero, group_size, bias, &op.input(out, "out"));
  });
}

#ifdef UNTORCH_CUDA_KERNELS
// out = x [m, k] · weightᵀ, bfloat16; the weight's layout is that of _convert_weight_to_int4pack.
UNTORCH_SHIM aoti_torch_cuda__weight_int4pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, std::int64_t qGroupSize,
                                                 AtenTensorHandle qScaleAndZeros, AtenTensorHandle* ret0) {
  return guarded("_weight_int4pack_mm", [&] {
    const Op op{"_weight_int4pack_mm", DeviceType::kCUDA};
    const Tensor &x = op.input(self, "self"), &weight = op.input(mat2, "mat2"),
                 &scales = op.input(qScaleAndZeros, "qScaleAndZeros");
    check(ret0 != nullptr, op, ": output pointer is null");
    const Int4Shape shape = check_int4pack(op, x, weight, qGroupSize, scales);
    const OnDevice on(op, x, {&weight, &scales});
    give(ret0, int4_linear_cuda(op, on, x, weight, scales, nullptr, shape), op);
  });
}
#endif
