// nvfp4_linear: W4A16 linear layers with NVFP4 weights.
#include "shims/nvfp4_linear.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "cuda/kernel_registry.h"
#include "kernels/cpu/w4a16/nvfp4.h"
#include "shims/dequantize.h"
#include "shims/destination.h"
#include "shims/nvfp4_arguments.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::Nvfp4Prefill;

namespace {

// n, k and the layout.
void read_weight(const char* op, const Tensor& weight, Nvfp4Shape& out) {
  if (weight.dtype() == DType::kUInt8) {
    check(weight.dim() == 2 && weight.size(1) * 2 % kNvfp4Block == 0, op,
          ": argument 'weight_packed' of uint8 must have shape [n, k/2] with k a multiple of 16, got ",
          to_string(weight.sizes()));
    out.n = weight.size(0), out.k = weight.size(1) * 2;
  } else {
    check(weight.dtype() == DType::kInt32, op, ": argument 'weight_packed' must be uint8 or int32, got ",
          dtype_name(weight.dtype()));
    check(weight.dim() == 4 && weight.size(2) == 32, op,
          ": argument 'weight_packed' of int32 must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got "
          "shape ",
          to_string(weight.sizes()));
    const std::int64_t words = weight.size(3);
    check(words == 1 || words == 2 || words == 4, op,
          ": argument 'weight_packed' must have 1, 2 or 4 in its last dimension (inner_k_tiles 2, 4 or 8), got shape ",
          to_string(weight.sizes()));
    out.n = weight.size(0) * 8, out.k = weight.size(1) * words * 32;
    out.inner_k_tiles = static_cast<int>(words * 2);
  }
  check(weight.is_contiguous(), op, ": argument 'weight_packed' must be contiguous, got shape ",
        to_string(weight.sizes()), " with strides ", to_string(weight.strides()));
}

// The weight and its scales alone, as nvfp4_linear takes them.
Nvfp4Shape check_nvfp4_weight(const char* op, const Tensor& weight, const Tensor& block_scale,
                              const Tensor& global_scale) {
  Nvfp4Shape out;
  read_weight(op, weight, out);
  check_is(op, "block_scale", block_scale, DType::kFloat8E4M3FN, Dims{out.n, out.k / kNvfp4Block});
  check(global_scale.dtype() == DType::kFloat32, op, ": argument 'global_scale' must be float32, got ",
        dtype_name(global_scale.dtype()));
  out.row_scales = global_scale.dim() == 1 && global_scale.size(0) == out.n && out.n != 1;
  check((out.row_scales || (global_scale.dim() <= 1 && global_scale.numel() == 1)) && global_scale.is_contiguous(), op,
        ": argument 'global_scale' must be contiguous and have shape [], [1] or [", out.n, "], got ",
        to_string(global_scale.sizes()));
  return out;
}

// x float32, bfloat16 or float16 [.., x_width] with a dense last dimension, x_width <= k; weight uint8 [n, k/2] or
// int32 [n/8][k/(16·t)][32][t/2], dense; block_scale float8_e4m3fn [n, k/16], dense; global_scale float32 with one
// element, or [n]; bias null or [n] of x's dtype, any stride. Looks at no device.
Nvfp4Shape check_nvfp4_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& block_scale,
                              const Tensor& global_scale, const Tensor* bias) {
  check_float_rows(op, "x", x);
  Nvfp4Shape out = check_nvfp4_weight(op, weight, block_scale, global_scale);
  check(x.size(-1) <= out.k, op, ": argument 'x' has ", x.size(-1), " features, 'weight_packed' of shape ",
        to_string(weight.sizes()), " takes at most k = ", out.k);
  if (bias != nullptr) check_bias(op, *bias, out.n, x.dtype());
  out.x_width = x.size(-1);
  out.m = rows_before_last(x);
  out.out_sizes = x.sizes();
  out.out_sizes[out.out_sizes.size() - 1] = out.n;
  return out;
}

// The argument `prefill`: "exact", "fp8" or "fp4".
Nvfp4Prefill check_prefill(const char* op, const char* prefill) {
  check(prefill != nullptr, op, ": argument 'prefill' is null");
  const std::string_view name = prefill;
  if (name == "exact") return Nvfp4Prefill::kExact;
  if (name == "fp8") return Nvfp4Prefill::kFp8;
  check(name == "fp4", op, ": argument 'prefill' must be exact, fp8 or fp4, got '", name, "'");
  return Nvfp4Prefill::kFp4;
}

// In float32, whatever x's dtype.
TensorPtr nvfp4_linear_cpu(const Tensor& x, const Tensor& weight, const Tensor& block_scale, const Tensor& global_scale,
                           const Tensor* bias, const Nvfp4Shape& shape) {
  const FloatRows rows = float_rows(x);
  TensorPtr out = Tensor::empty(shape.out_sizes, DType::kFloat32);
  std::vector<float> bias_row(static_cast<std::size_t>(shape.n), 0.0f);
  if (bias != nullptr) {
    const TensorPtr dense = contiguous(*to_dtype(*bias, DType::kFloat32));
    std::copy_n(dense->data<float>(), shape.n, bias_row.data());
  }
  float* const to = out->data<float>();
  for (std::int64_t i = 0; i < shape.m; ++i) std::copy(bias_row.begin(), bias_row.end(), to + i * shape.n);
  kernels::cpu::Nvfp4Linear p;
  p.m = shape.m, p.n = shape.n;
  p.x = rows.tensor->data<float>(), p.x_width = shape.x_width, p.x_stride = rows.stride;
  p.weight.k = shape.k, p.weight.codes = weight.raw(), p.weight.inner_k_tiles = shape.inner_k_tiles;
  p.weight.block_scales = bytes_of(block_scale);
  p.weight.global_scales = global_scale.data<float>(), p.weight.row_scales = shape.row_scales;
  p.out = to;
  std::vector<float> scratch;
  kernels::cpu::nvfp4_linear(p, scratch);
  return to_dtype(*out, x.dtype());
}

}  // namespace

namespace untorch::shims {

TensorPtr dequantize_nvfp4(const char* what, const Tensor& weight, const Tensor& block_scale,
                           const Tensor& global_scale, DType dtype) {
  const Op op{what, DeviceType::kCUDA};
  const Nvfp4Shape shape = check_nvfp4_weight(op, weight, block_scale, global_scale);
  TensorPtr out;
  run(
      op, {&weight, &block_scale, &global_scale},
      [&] { throw_error(ErrorKind::kUnsupported, op, ": dequantize_weights: ", cuda::kBuiltWithoutCuda); },
      [&](const auto& on) { out = dequantize_nvfp4_cuda(op, on, weight, block_scale, global_scale, shape, dtype); });
  return out;
}

}  // namespace untorch::shims

namespace {

// out = x [.., k_in] · weightᵀ + bias, for float32, bfloat16 and float16. prefill: "exact", "fp8" or "fp4", a request
// for speed at large M on GPUs; the CPU is exact whatever it asks for. `into` null: new memory.
TensorPtr nvfp4_linear(const Op& op, AtenTensorHandle x, AtenTensorHandle weight_packed, AtenTensorHandle block_scale,
                       AtenTensorHandle global_scale, AtenTensorHandle* bias, const char* prefill, const Tensor* into) {
  const Tensor &input = op.input(x, "x"), &packed = op.input(weight_packed, "weight_packed"),
               &scales = op.input(block_scale, "block_scale"), &global = op.input(global_scale, "global_scale");
  const Tensor* const bias_or_null = op.optional_input(bias, "bias");
  const Nvfp4Shape shape = check_nvfp4_linear(op, input, packed, scales, global, bias_or_null);
  const Nvfp4Prefill wanted = check_prefill(op, prefill);
  TensorPtr out;
  run(
      op, {&input, &packed, &scales, &global, bias_or_null},
      [&] { out = delivered(op, into, nvfp4_linear_cpu(input, packed, scales, global, bias_or_null, shape)); },
      [&](const auto& on) {
        out = nvfp4_linear_cuda(op, on, input, packed, scales, global, bias_or_null, shape, wanted, into);
      });
  return out;
}

}  // namespace

UNTORCH_OP(nvfp4_linear,
           (AtenTensorHandle x, AtenTensorHandle weight_packed, AtenTensorHandle block_scale,
            AtenTensorHandle global_scale, AtenTensorHandle* bias, const char* prefill, AtenTensorHandle* ret0),
           x, weight_packed, block_scale, global_scale, bias, prefill, ret0) {
  check(ret0 != nullptr, op, ": output pointer is null");
  give(ret0, nvfp4_linear(op, x, weight_packed, block_scale, global_scale, bias, prefill, nullptr), op);
}

// The same into memory of the caller, on the device of x.
UNTORCH_SHIM untorch_nvfp4_linear(AtenTensorHandle out, AtenTensorHandle x, AtenTensorHandle weight_packed,
                                  AtenTensorHandle block_scale, AtenTensorHandle global_scale, AtenTensorHandle* bias,
                                  const char* prefill) {
  return guarded("nvfp4_linear", [&] {
    const Op op = Op::of("nvfp4_linear", x, "x");
    const FromTorch relaxed(op);
    (void)nvfp4_linear(op, x, weight_packed, block_scale, global_scale, bias, prefill, &op.input(out, "out"));
  });
}
