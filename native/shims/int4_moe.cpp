// int4_moe: fused MoE with int4 weights, the weighted sum of each token's experts, gated MLPs.
#include "shims/int4_moe.h"

#include "kernels/cpu/moe/int4_moe.h"
#include "shims/destination.h"
#include "shims/int4_linear.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

struct WeightArguments {
  const char *name, *scale_name;
  const Tensor &weight, &scales;
};

// The weight of `experts` matrices [n, at least inputs] below each other: of int4_linear's layout, which is 4-D, or of
// w4a8_linear's. On CUDA alone int4_linear's with inner_k_tiles 8.
Int4WeightShape check_weight(const Op& op, const WeightArguments& given, std::int64_t experts, std::int64_t n,
                             std::int64_t inputs, std::int64_t group, bool integers) {
  const Tensor &weight = given.weight, &scales = given.scales;
  Int4WeightShape out;
  out.n = n;
  const std::int64_t rows = experts * n, wanted = (inputs + group - 1) / group * group;
  check(is_floating(scales.dtype()) && scales.dtype() != DType::kFloat64, op, ": argument '", given.scale_name,
        "' must be float32, bfloat16 or float16, got ", dtype_name(scales.dtype()));
  if (integers) {
    out.k = wanted;
    check_is(op, given.name, weight, DType::kInt32, Dims{rows / 16, out.k / 8, 16});
    const std::int64_t parts = scales.dim() == 4 && scales.size(2) == 1 ? 1 : 2;
    check_is(op, given.scale_name, scales, scales.dtype(), Dims{rows / 16, out.k / group, parts, 16});
  } else {
    const std::int64_t words = weight.dim() == 4 ? weight.size(3) : 0;
    if (op.on_cuda()) {
      check(words == 4, op, ": argument '", given.name,
            "' must be packed as [n/8][k/128][32][4] on a GPU (inner_k_tiles 8), got shape ",
            to_string(weight.sizes()));
    }
    check(words == 1 || words == 2 || words == 4, op, ": argument '", given.name,
          "' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape ",
          to_string(weight.sizes()));
    out.inner_k_tiles = static_cast<int>(words * 2), out.k = weight.size(1) * words * 32;
    check(out.k >= inputs && out.k % group == 0, op, ": argument '", given.name, "' must have k of at least ", inputs,
          " and a multiple of the group size ", group, ", got shape ", to_string(weight.sizes()));
    check_is(op, given.name, weight, DType::kInt32, Dims{rows / 8, weight.size(1), 32, words});
    check_is(op, given.scale_name, scales, scales.dtype(), Dims{out.k / group, rows, 2});
  }
  return out;
}

// hidden_states float32, bfloat16 or float16 [M, K] with a dense last dimension; topk_weights float32 and topk_ids
// int32 [M, top_k]; weights as check_weight has them; biases float32 [E, 2·I] and [E, K]; all dense but the first.
Int4MoeShape check_int4_moe(const Op& op, const Int4MoeArguments& given) {
  const Tensor& x = given.hidden_states;
  check_float_rows(op, "hidden_states", x);
  check_rank(op, "hidden_states", x, 2);
  check_rank(op, "topk_weights", given.topk_weights, 2);
  check_swiglu(op, given.swiglu);
  const std::int64_t group = given.group, width = given.intermediate;
  check(group == 32 || group == 64 || group == 128 || group == 256, op,
        ": argument 'group_size' must be 32, 64, 128 or 256, got ", group);
  check(width > 0 && width % 8 == 0, op, ": argument 'intermediate' must be a multiple of 8 above 0, got ", width);
  Int4MoeShape out;
  out.tokens = x.size(0), out.k = x.size(1), out.intermediate = width, out.top_k = given.topk_weights.size(1);
  out.group = group;
  check(out.k > 0 && out.k % 16 == 0, op,
        ": argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape ",
        to_string(x.sizes()));
  out.integers = !op.on_cuda() && given.w13.dim() == 3;
  const std::int64_t rows = given.w13.dim() == 0 ? 0 : given.w13.size(0) * (out.integers ? 16 : 8);
  check(rows > 0 && rows % (2 * width) == 0, op, ": argument 'w13' must have a multiple of ", 2 * width,
        " outputs, two times 'intermediate', got shape ", to_string(given.w13.sizes()));
  out.experts = rows / (2 * width);
  check_is(op, "topk_weights", given.topk_weights, DType::kFloat32, Dims{out.tokens, out.top_k});
  check_is(op, "topk_ids", given.topk_ids, DType::kInt32, Dims{out.tokens, out.top_k});
  out.w13 = check_weight(op, {"w13", "w13_scale_and_zero", given.w13, given.w13_scales}, out.experts, 2 * width, out.k,
                         group, out.integers);
  out.w2 = check_weight(op, {"w2", "w2_scale_and_zero", given.w2, given.w2_scales}, out.experts, out.k, width, group,
                        out.integers);
  if (given.w13_bias != nullptr) {
    check_is(op, "w13_bias", *given.w13_bias, DType::kFloat32, Dims{out.experts, 2 * width});
  }
  if (given.w2_bias != nullptr) check_is(op, "w2_bias", *given.w2_bias, DType::kFloat32, Dims{out.experts, out.k});
  return out;
}

kernels::cpu::Int4Experts experts_of(const Tensor& weight, const Tensor& scales, const Int4WeightShape& shape) {
  kernels::cpu::Int4Experts out;
  out.n = shape.n, out.k = shape.k, out.inner_k_tiles = shape.inner_k_tiles;
  out.weight = weight.data<std::int32_t>();
  out.scales = scales.raw(), out.scale_type = scale_type_of(scales.dtype());
  out.has_zeros = scales.dim() != 4 || scales.size(2) != 1;
  return out;
}

// In float32, whatever the activations' dtype.
TensorPtr int4_moe_cpu(const char* op, const Int4MoeArguments& given, const Int4MoeShape& shape) {
  kernels::cpu::Int4Moe p;
  p.tokens = shape.tokens, p.k = shape.k, p.experts = shape.experts;
  p.intermediate = shape.intermediate, p.top_k = shape.top_k, p.group = shape.group;
  p.integers = shape.integers;
  p.w13 = experts_of(given.w13, given.w13_scales, shape.w13);
  p.w2 = experts_of(given.w2, given.w2_scales, shape.w2);
  if (given.w13_bias != nullptr) p.w13_bias = given.w13_bias->data<float>();
  if (given.w2_bias != nullptr) p.w2_bias = given.w2_bias->data<float>();
  p.swiglu = given.swiglu.for_cpu();
  const FloatRows values = float_rows(given.hidden_states);
  p.x = values.tensor->data<float>(), p.x_stride = values.stride;
  p.topk_weights = given.topk_weights.data<float>(), p.topk_ids = given.topk_ids.data<std::int32_t>();
  TensorPtr out = Tensor::empty(Dims{p.tokens, p.k}, DType::kFloat32);
  p.out = out->data<float>();
  check_pair(op, p, kernels::cpu::int4_moe(p));
  return to_dtype(*out, given.hidden_states.dtype());
}

TensorPtr int4_moe(const Op& op, const Int4MoeArguments& given, const Tensor* into) {
  const Int4MoeShape shape = check_int4_moe(op, given);
  TensorPtr out;
  run(
      op,
      {&given.hidden_states, &given.topk_weights, &given.topk_ids, &given.w13, &given.w13_scales, &given.w2,
       &given.w2_scales, given.w13_bias, given.w2_bias},
      [&] { out = delivered(op, into, int4_moe_cpu(op, given, shape)); },
      [&](const auto& on) { out = int4_moe_cuda(op, on, given, shape, into); });
  return out;
}

Int4MoeArguments moe_arguments(const Op& op, AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                               AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale_and_zero,
                               AtenTensorHandle w2, AtenTensorHandle w2_scale_and_zero, std::int64_t group_size,
                               std::int64_t intermediate, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                               double swiglu_alpha, double swiglu_beta, const double* swiglu_limit) {
  Int4MoeArguments given{{op.input(hidden_states, "hidden_states"), op.input(topk_weights, "topk_weights"),
                          op.input(topk_ids, "topk_ids")},
                         op.input(w13, "w13"),
                         op.input(w13_scale_and_zero, "w13_scale_and_zero"),
                         op.input(w2, "w2"),
                         op.input(w2_scale_and_zero, "w2_scale_and_zero"),
                         group_size,
                         intermediate};
  given.w13_bias = op.optional_input(w13_bias, "w13_bias");
  given.w2_bias = op.optional_input(w2_bias, "w2_bias");
  given.swiglu = {swiglu_alpha, swiglu_beta, swiglu_limit};
  return given;
}

}  // namespace

// For float32, bfloat16 and float16. Layouts are int4_linear's or, on the CPU, w4a8_linear's, where activations are
// quantized.
UNTORCH_OP(int4_moe,
           (AtenTensorHandle hidden_states, AtenTensorHandle topk_weights, AtenTensorHandle topk_ids,
            AtenTensorHandle w13, AtenTensorHandle w13_scale_and_zero, AtenTensorHandle w2,
            AtenTensorHandle w2_scale_and_zero, std::int64_t group_size, std::int64_t intermediate,
            AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias, double swiglu_alpha, double swiglu_beta,
            const double* swiglu_limit, AtenTensorHandle* ret0),
           hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero, group_size,
           intermediate, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit, ret0) {
  check(ret0 != nullptr, op, ": output pointer is null");
  const Int4MoeArguments given =
      moe_arguments(op, hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero,
                    group_size, intermediate, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit);
  give(ret0, int4_moe(op, given, nullptr), op);
}

// The same into memory of the caller, on the device of hidden_states.
UNTORCH_SHIM untorch_int4_moe(AtenTensorHandle out, AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                              AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale_and_zero,
                              AtenTensorHandle w2, AtenTensorHandle w2_scale_and_zero, std::int64_t group_size,
                              std::int64_t intermediate, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                              double swiglu_alpha, double swiglu_beta, const double* swiglu_limit) {
  return guarded("int4_moe", [&] {
    const Op op = Op::of("int4_moe", hidden_states, "hidden_states");
    const FromTorch relaxed(op);
    const Int4MoeArguments given =
        moe_arguments(op, hidden_states, topk_weights, topk_ids, w13, w13_scale_and_zero, w2, w2_scale_and_zero,
                      group_size, intermediate, w13_bias, w2_bias, swiglu_alpha, swiglu_beta, swiglu_limit);
    (void)int4_moe(op, given, &op.input(out, "out"));
  });
}
