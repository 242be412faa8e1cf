// w8a8_linear: linear layers with 8-bit weights, int8 or float8_e4m3fn, for GPUs.
#include "shims/w8a8_linear.h"

#include <algorithm>
#include <vector>

#include "kernels/gemm.h"
#include "shims/destination.h"
#include "shims/gemm.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr std::int64_t kSizeStep = 16, kBlock = 128, kBlocksStep = 4;

std::int64_t rounded_up(std::int64_t size, std::int64_t step) { return (size + step - 1) / step * step; }

// x float32, bfloat16 or float16 [.., x_width] with a dense last dimension, x_width <= k; weight int8 or float8_e4m3fn
// [n, k], dense, n and k multiples of 16; scale float32 [n], or for float8 [⌈n / 128⌉, ⌈k / 128⌉ to a multiple of 4],
// dense; bias null or [n] of x's dtype, any stride. Looks at no device.
W8A8Shape check_w8a8(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor* bias) {
  check_float_rows(op, "x", x);
  const bool is_fp8 = weight.dtype() == DType::kFloat8E4M3FN;
  check(is_fp8 || weight.dtype() == DType::kInt8, op, ": argument 'weight' must be int8 or float8_e4m3fn, got ",
        dtype_name(weight.dtype()));
  check_rank(op, "weight", weight, 2);
  W8A8Shape out;
  out.n = weight.size(0), out.k = weight.size(1);
  check(out.n % kSizeStep == 0 && out.k % kSizeStep == 0 && weight.is_contiguous(), op,
        ": argument 'weight' must be contiguous with sizes that are multiples of ", kSizeStep, ", got shape ",
        to_string(weight.sizes()), " with strides ", to_string(weight.strides()));
  if (is_fp8 && scale.dim() == 2) {
    out.scales_row = rounded_up(rounded_up(out.k, kBlock) / kBlock, kBlocksStep);
    check_is(op, "scale", scale, DType::kFloat32, Dims{rounded_up(out.n, kBlock) / kBlock, out.scales_row});
  } else {
    check_is(op, "scale", scale, DType::kFloat32, Dims{out.n});
  }
  check(x.size(-1) <= out.k, op, ": argument 'x' has ", x.size(-1), " features, 'weight' of shape ",
        to_string(weight.sizes()), " takes at most ", out.k);
  if (bias != nullptr) check_bias(op, *bias, out.n, x.dtype());
  out.x_width = x.size(-1);
  out.m = rows_before_last(x);
  out.out_sizes = x.sizes();
  out.out_sizes[out.out_sizes.size() - 1] = out.n;
  return out;
}

// In float32 with the whole weight, x as it is: no file has the operator for CPUs.
TensorPtr w8a8_linear_cpu(const Tensor& x, const Tensor& weight, const Tensor& scale, const Tensor* bias,
                          const W8A8Shape& shape) {
  const TensorPtr matrix = Tensor::empty(weight.sizes(), DType::kFloat32);
  if (weight.dtype() == DType::kInt8) {
    copy(*matrix, weight);
  } else {
    kernels::cpu::float8_to_float(matrix_of(weight), matrix->data<float>());
  }
  const auto* const scales = scale.data<float>();
  for (std::int64_t i = 0; i < shape.n; ++i) {
    float* const row = matrix->data<float>() + i * shape.k;
    for (std::int64_t j = 0; j < shape.k; ++j) {
      row[j] *= shape.scales_row == 0 ? scales[i] : scales[i / kBlock * shape.scales_row + j / kBlock];
    }
  }
  const TensorPtr wide = contiguous(*to_dtype(x, DType::kFloat32));
  const TensorPtr rows = wide->view(Dims{shape.m, shape.x_width}, Dims{shape.x_width, 1}, wide->storage_offset());
  const TensorPtr turned = matrix->view(Dims{shape.x_width, shape.n}, Dims{1, shape.k}, 0);
  TensorPtr out = Tensor::empty(shape.out_sizes, DType::kFloat32);
  const TensorPtr flat = out->view(Dims{shape.m, shape.n}, Dims{shape.n, 1}, 0);
  if (bias != nullptr) {
    copy(*flat, *to_dtype(*bias, DType::kFloat32));
  }
  kernels::cpu::gemm(matrix_of(*rows), matrix_of(*turned), matrix_of(*flat), 1.0, bias != nullptr ? 1.0 : 0.0);
  return to_dtype(*out, x.dtype());
}

// `into` null: new memory.
TensorPtr w8a8_linear(const Op& op, AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale,
                      AtenTensorHandle* bias, const Tensor* into) {
  const Tensor &input = op.input(x, "x"), &values = op.input(weight, "weight"), &scales = op.input(scale, "scale");
  const Tensor* const bias_or_null = op.optional_input(bias, "bias");
  const W8A8Shape shape = check_w8a8(op, input, values, scales, bias_or_null);
  TensorPtr out;
  run(
      op, {&input, &values, &scales, bias_or_null},
      [&] { out = delivered(op, into, w8a8_linear_cpu(input, values, scales, bias_or_null, shape)); },
      [&](const auto& on) { out = w8a8_linear_cuda(op, on, input, values, scales, bias_or_null, shape, into); });
  return out;
}

}  // namespace

UNTORCH_OP(w8a8_linear,
           (AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle scale, AtenTensorHandle* bias,
            AtenTensorHandle* ret0),
           x, weight, scale, bias, ret0) {
  check(ret0 != nullptr, op, ": output pointer is null");
  give(ret0, w8a8_linear(op, x, weight, scale, bias, nullptr), op);
}

// The same into memory of the caller, on the device of x.
UNTORCH_SHIM untorch_w8a8_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight,
                                 AtenTensorHandle scale, AtenTensorHandle* bias) {
  return guarded("w8a8_linear", [&] {
    const Op op = Op::of("w8a8_linear", x, "x");
    const FromTorch relaxed(op);
    (void)w8a8_linear(op, x, weight, scale, bias, &op.input(out, "out"));
  });
}
