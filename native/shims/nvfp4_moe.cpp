// nvfp4_moe: fused MoE with NVFP4 weights, the weighted sum of each token's experts, gated MLPs.
#include "shims/nvfp4_moe.h"

#include "kernels/cpu/moe/nvfp4_moe.h"
#include "shims/destination.h"
#include "shims/nvfp4_arguments.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// hidden_states float32, bfloat16 or float16 [M, K] with a dense last dimension; topk_weights float32 and topk_ids
// int32 [M, top_k]; w13 uint8 [E, 2·I, K/2] and w2 [E, K, I/2]; their scales float8_e4m3fn, a sixteenth as wide; or, on
// the CPU, all rows in w4a8_linear's layout, whose words are int32. w13_global float32 [E] or [E, 2], w2_global [E];
// biases float32 [E, 2·I] and [E, K]; all dense but the first. alpha and beta finite in float32, the limit above 0.
Nvfp4MoeShape check_nvfp4_moe(const Op& op, const Nvfp4MoeArguments& given) {
  check_float_rows(op, "hidden_states", given.hidden_states);
  check_rank(op, "hidden_states", given.hidden_states, 2);
  check_rank(op, "topk_weights", given.topk_weights, 2);
  check_rank(op, "w13", given.w13, 3);
  Nvfp4MoeShape out;
  out.tokens = given.hidden_states.size(0), out.k = given.hidden_states.size(1);
  out.integers = !op.on_cuda() && given.w13.dtype() == DType::kInt32;
  if (out.integers) {
    check(given.w13_global.dim() > 0 && given.w13_global.size(0) > 0, op,
          ": argument 'w13_global' must have shape [experts] or [experts, 2], got ",
          to_string(given.w13_global.sizes()));
    out.experts = given.w13_global.size(0);
  } else {
    out.experts = given.w13.size(0);
  }
  const std::int64_t rows = out.integers ? given.w13.size(0) * 16 / out.experts : given.w13.size(1);
  out.intermediate = rows / 2, out.top_k = given.topk_weights.size(1);
  check(out.k > 0 && out.k % kNvfp4Block == 0, op,
        ": argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape ",
        to_string(given.hidden_states.sizes()));
  check(out.intermediate > 0 && out.intermediate % kNvfp4Block == 0 && rows % 2 == 0, op,
        ": argument 'w13' must have two times a multiple of 16 rows", out.integers ? " for each expert" : "",
        ", got shape ", to_string(given.w13.sizes()));
  const std::int64_t e = out.experts, k = out.k, i = out.intermediate;
  check_is(op, "topk_weights", given.topk_weights, DType::kFloat32, Dims{out.tokens, out.top_k});
  check_is(op, "topk_ids", given.topk_ids, DType::kInt32, Dims{out.tokens, out.top_k});
  const auto check_weight = [&](const char* name, const Tensor& weight, const char* scale_name, const Tensor& scale,
                                std::int64_t n, std::int64_t inputs) {
    if (out.integers) {
      const std::int64_t panels = e * n / 16, padded = (inputs + 31) / 32 * 32;
      check_is(op, name, weight, DType::kInt32, Dims{panels, padded / 8, 16});
      check_is(op, scale_name, scale, DType::kFloat8E4M3FN, Dims{panels, padded / kNvfp4Block, 16});
    } else {
      check_is(op, name, weight, DType::kUInt8, Dims{e, n, inputs / 2});
      check_is(op, scale_name, scale, DType::kFloat8E4M3FN, Dims{e, n, inputs / kNvfp4Block});
    }
  };
  check_weight("w13", given.w13, "w13_scale", given.w13_scale, 2 * i, k);
  check_weight("w2", given.w2, "w2_scale", given.w2_scale, k, i);
  out.two_scales = given.w13_global.dim() == 2;
  check_is(op, "w13_global", given.w13_global, DType::kFloat32, out.two_scales ? Dims{e, 2} : Dims{e});
  check_is(op, "w2_global", given.w2_global, DType::kFloat32, Dims{e});
  if (given.w13_bias != nullptr) check_is(op, "w13_bias", *given.w13_bias, DType::kFloat32, Dims{e, 2 * i});
  if (given.w2_bias != nullptr) check_is(op, "w2_bias", *given.w2_bias, DType::kFloat32, Dims{e, k});
  check_swiglu(op, given.swiglu);
  return out;
}

// In float32, whatever the activations' dtype.
TensorPtr nvfp4_moe_cpu(const char* op, const Nvfp4MoeArguments& given, const Nvfp4MoeShape& shape) {
  const FloatRows rows = float_rows(given.hidden_states);
  TensorPtr out = Tensor::empty(Dims{shape.tokens, shape.k}, DType::kFloat32);
  kernels::cpu::Nvfp4Moe p;
  p.tokens = shape.tokens, p.k = shape.k, p.experts = shape.experts;
  p.intermediate = shape.intermediate, p.top_k = shape.top_k;
  p.x = rows.tensor->data<float>(), p.x_stride = rows.stride;
  p.topk_weights = given.topk_weights.data<float>(), p.topk_ids = given.topk_ids.data<std::int32_t>();
  p.w13 = bytes_of(given.w13), p.w13_scale = bytes_of(given.w13_scale);
  p.w2 = bytes_of(given.w2), p.w2_scale = bytes_of(given.w2_scale);
  p.w13_global = given.w13_global.data<float>(), p.w2_global = given.w2_global.data<float>();
  p.two_scales = shape.two_scales, p.integers = shape.integers;
  if (given.w13_bias != nullptr) p.w13_bias = given.w13_bias->data<float>();
  if (given.w2_bias != nullptr) p.w2_bias = given.w2_bias->data<float>();
  p.swiglu = given.swiglu.for_cpu();
  p.out = out->data<float>();
  check_pair(op, p, kernels::cpu::nvfp4_moe(p));
  return to_dtype(*out, given.hidden_states.dtype());
}

TensorPtr nvfp4_moe(const Op& op, const Nvfp4MoeArguments& given, const Tensor* into) {
  const Nvfp4MoeShape shape = check_nvfp4_moe(op, given);
  TensorPtr out;
  run(
      op,
      {&given.hidden_states, &given.topk_weights, &given.topk_ids, &given.w13, &given.w13_scale, &given.w2,
       &given.w2_scale, &given.w13_global, &given.w2_global, given.w13_bias, given.w2_bias},
      [&] { out = delivered(op, into, nvfp4_moe_cpu(op, given, shape)); },
      [&](const auto& on) { out = nvfp4_moe_cuda(op, on, given, shape, into); });
  return out;
}

Nvfp4MoeArguments moe_arguments(const Op& op, AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                                AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale,
                                AtenTensorHandle w2, AtenTensorHandle w2_scale, AtenTensorHandle w13_global,
                                AtenTensorHandle w2_global, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                                double swiglu_alpha, double swiglu_beta, const double* swiglu_limit) {
  Nvfp4MoeArguments given{{op.input(hidden_states, "hidden_states"), op.input(topk_weights, "topk_weights"),
                           op.input(topk_ids, "topk_ids")},
                          op.input(w13, "w13"),
                          op.input(w13_scale, "w13_scale"),
                          op.input(w2, "w2"),
                          op.input(w2_scale, "w2_scale"),
                          op.input(w13_global, "w13_global"),
                          op.input(w2_global, "w2_global")};
  given.w13_bias = op.optional_input(w13_bias, "w13_bias");
  given.w2_bias = op.optional_input(w2_bias, "w2_bias");
  given.swiglu = {swiglu_alpha, swiglu_beta, swiglu_limit};
  return given;
}

}  // namespace

UNTORCH_OP(nvfp4_moe,
           (AtenTensorHandle hidden_states, AtenTensorHandle topk_weights, AtenTensorHandle topk_ids,
            AtenTensorHandle w13, AtenTensorHandle w13_scale, AtenTensorHandle w2, AtenTensorHandle w2_scale,
            AtenTensorHandle w13_global, AtenTensorHandle w2_global, AtenTensorHandle* w13_bias,
            AtenTensorHandle* w2_bias, double swiglu_alpha, double swiglu_beta, const double* swiglu_limit,
            AtenTensorHandle* ret0),
           hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global, w13_bias,
           w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit, ret0) {
  const Nvfp4MoeArguments given =
      moe_arguments(op, hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global,
                    w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit);
  check(ret0 != nullptr, op, ": output pointer is null");
  give(ret0, nvfp4_moe(op, given, nullptr), op);
}

// The same into memory of the caller, on the device of hidden_states.
UNTORCH_SHIM untorch_nvfp4_moe(AtenTensorHandle out, AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                               AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale,
                               AtenTensorHandle w2, AtenTensorHandle w2_scale, AtenTensorHandle w13_global,
                               AtenTensorHandle w2_global, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                               double swiglu_alpha, double swiglu_beta, const double* swiglu_limit) {
  return guarded("nvfp4_moe", [&] {
    const Op op = Op::of("nvfp4_moe", hidden_states, "hidden_states");
    const FromTorch relaxed(op);
    const Nvfp4MoeArguments given =
        moe_arguments(op, hidden_states, topk_weights, topk_ids, w13, w13_scale, w2, w2_scale, w13_global, w2_global,
                      w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit);
    (void)nvfp4_moe(op, given, &op.input(out, "out"));
  });
}
