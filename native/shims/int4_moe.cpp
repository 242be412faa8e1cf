// int4_moe: fused MoE with int4 weights on the CPU, the weighted sum of each token's experts, gated MLPs. CUDA has
// none.
#include "kernels/cpu/moe/int4_moe.h"

#include "shims/destination.h"
#include "shims/int4_linear.h"
#include "shims/moe_arguments.h"
#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "int4_moe";

struct WeightArguments {
  const char *name, *scale_name;
  const Tensor &weight, &scales;
};

// The weight of `experts` matrices [n, at least inputs] below each other: of int4_linear's layout, which is 4-D, or of
// w4a8_linear's.
kernels::cpu::Int4Experts check_weight(const WeightArguments& given, std::int64_t experts, std::int64_t n,
                                       std::int64_t inputs, std::int64_t group, bool integers) {
  const Tensor &weight = given.weight, &scales = given.scales;
  kernels::cpu::Int4Experts out;
  out.n = n;
  const std::int64_t rows = experts * n, wanted = (inputs + group - 1) / group * group;
  check(is_floating(scales.dtype()) && scales.dtype() != DType::kFloat64, kOp, ": argument '", given.scale_name,
        "' must be float32, bfloat16 or float16, got ", dtype_name(scales.dtype()));
  if (integers) {
    out.k = wanted;
    check_is(kOp, given.name, weight, DType::kInt32, Dims{rows / 16, out.k / 8, 16});
    check_is(kOp, given.scale_name, scales, scales.dtype(), Dims{rows / 16, out.k / group, 2, 16});
  } else {
    const std::int64_t words = weight.dim() == 4 ? weight.size(3) : 0;
    check(words == 1 || words == 2 || words == 4, kOp, ": argument '", given.name,
          "' must be packed as [n/8][k/(16*inner_k_tiles)][32][inner_k_tiles/2], got shape ",
          to_string(weight.sizes()));
    out.inner_k_tiles = static_cast<int>(words * 2), out.k = weight.size(1) * words * 32;
    check(out.k >= inputs && out.k % group == 0, kOp, ": argument '", given.name, "' must have k of at least ", inputs,
          " and a multiple of the group size ", group, ", got shape ", to_string(weight.sizes()));
    check_is(kOp, given.name, weight, DType::kInt32, Dims{rows / 8, weight.size(1), 32, words});
    check_is(kOp, given.scale_name, scales, scales.dtype(), Dims{out.k / group, rows, 2});
  }
  out.weight = weight.data<std::int32_t>();
  out.scales = scales.raw(), out.scale_type = scale_type_of(scales.dtype());
  return out;
}

const float* bias_of(const char* argument, const Tensor* bias, std::int64_t experts, std::int64_t n) {
  if (bias == nullptr) return nullptr;
  check_is(kOp, argument, *bias, DType::kFloat32, Dims{experts, n});
  return bias->data<float>();
}

struct MoeInputs {
  AtenTensorHandle hidden_states, topk_weights, topk_ids, w13, w13_scales, w2, w2_scales;
  std::int64_t group_size, intermediate;
  AtenTensorHandle *w13_bias, *w2_bias;
  SwigluArguments swiglu;
};

// In float32, whatever the activations' dtype.
TensorPtr int4_moe(const MoeInputs& given, const Tensor* into) {
  const Tensor &x = cpu_input(given.hidden_states, kOp, "hidden_states"),
               &weights = cpu_input(given.topk_weights, kOp, "topk_weights"),
               &ids = cpu_input(given.topk_ids, kOp, "topk_ids");
  const WeightArguments w13{"w13", "w13_scale_and_zero", cpu_input(given.w13, kOp, "w13"),
                            cpu_input(given.w13_scales, kOp, "w13_scale_and_zero")},
      w2{"w2", "w2_scale_and_zero", cpu_input(given.w2, kOp, "w2"),
         cpu_input(given.w2_scales, kOp, "w2_scale_and_zero")};
  const Tensor *const w13_bias = optional_cpu_input(given.w13_bias, kOp, "w13_bias"), *const w2_bias =
                                                                                          optional_cpu_input(
                                                                                              given.w2_bias, kOp,
                                                                                              "w2_bias");
  check_float_rows(kOp, "hidden_states", x);
  check_rank(kOp, "hidden_states", x, 2);
  check_rank(kOp, "topk_weights", weights, 2);
  check_swiglu(kOp, given.swiglu);
  const std::int64_t group = given.group_size, width = given.intermediate;
  check(group == 32 || group == 64 || group == 128 || group == 256, kOp,
        ": argument 'group_size' must be 32, 64, 128 or 256, got ", group);
  check(width > 0 && width % 8 == 0, kOp, ": argument 'intermediate' must be a multiple of 8 above 0, got ", width);

  kernels::cpu::Int4Moe p;
  p.tokens = x.size(0), p.k = x.size(1), p.intermediate = width, p.top_k = weights.size(1), p.group = group;
  check(p.k > 0 && p.k % 16 == 0, kOp,
        ": argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape ",
        to_string(x.sizes()));
  p.integers = w13.weight.dim() == 3;
  const std::int64_t rows = w13.weight.dim() == 0 ? 0 : w13.weight.size(0) * (p.integers ? 16 : 8);
  check(rows > 0 && rows % (2 * width) == 0, kOp, ": argument 'w13' must have a multiple of ", 2 * width,
        " outputs, two times 'intermediate', got shape ", to_string(w13.weight.sizes()));
  p.experts = rows / (2 * width);
  check_is(kOp, "topk_weights", weights, DType::kFloat32, Dims{p.tokens, p.top_k});
  check_is(kOp, "topk_ids", ids, DType::kInt32, Dims{p.tokens, p.top_k});
  p.w13 = check_weight(w13, p.experts, 2 * width, p.k, group, p.integers);
  p.w2 = check_weight(w2, p.experts, p.k, width, group, p.integers);
  p.w13_bias = bias_of("w13_bias", w13_bias, p.experts, 2 * width);
  p.w2_bias = bias_of("w2_bias", w2_bias, p.experts, p.k);
  p.swiglu = given.swiglu.for_cpu();

  const FloatRows values = float_rows(x);
  p.x = values.tensor->data<float>(), p.x_stride = values.stride;
  p.topk_weights = weights.data<float>(), p.topk_ids = ids.data<std::int32_t>();
  TensorPtr out = Tensor::empty(Dims{p.tokens, p.k}, DType::kFloat32);
  p.out = out->data<float>();
  check_pair(kOp, p, kernels::cpu::int4_moe(p));
  return delivered(kOp, into, to_dtype(*out, x.dtype()));
}

}  // namespace

// For float32, bfloat16 and float16; see kernels/cpu/moe/int4_moe.h. Layouts are int4_linear's or w4a8_linear's, where
// activations are quantized.
UNTORCH_SHIM aoti_torch_cpu_int4_moe(AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                                     AtenTensorHandle topk_ids, AtenTensorHandle w13,
                                     AtenTensorHandle w13_scale_and_zero, AtenTensorHandle w2,
                                     AtenTensorHandle w2_scale_and_zero, std::int64_t group_size,
                                     std::int64_t intermediate, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                                     double swiglu_alpha, double swiglu_beta, const double* swiglu_limit,
                                     AtenTensorHandle* ret0) {
  return guarded(kOp, [&] {
    check(ret0 != nullptr, kOp, ": output pointer is null");
    give(ret0,
         int4_moe({hidden_states,
                   topk_weights,
                   topk_ids,
                   w13,
                   w13_scale_and_zero,
                   w2,
                   w2_scale_and_zero,
                   group_size,
                   intermediate,
                   w13_bias,
                   w2_bias,
                   {swiglu_alpha, swiglu_beta, swiglu_limit}},
                  nullptr),
         kOp);
  });
}

// The same into memory of the caller.
UNTORCH_SHIM untorch_int4_moe(AtenTensorHandle out, AtenTensorHandle hidden_states, AtenTensorHandle topk_weights,
                              AtenTensorHandle topk_ids, AtenTensorHandle w13, AtenTensorHandle w13_scale_and_zero,
                              AtenTensorHandle w2, AtenTensorHandle w2_scale_and_zero, std::int64_t group_size,
                              std::int64_t intermediate, AtenTensorHandle* w13_bias, AtenTensorHandle* w2_bias,
                              double swiglu_alpha, double swiglu_beta, const double* swiglu_limit) {
  return guarded(kOp, [&] {
    (void)int4_moe({hidden_states,
                    topk_weights,
                    topk_ids,
                    w13,
                    w13_scale_and_zero,
                    w2,
                    w2_scale_and_zero,
                    group_size,
                    intermediate,
                    w13_bias,
                    w2_bias,
                    {swiglu_alpha, swiglu_beta, swiglu_limit}},
                   &cpu_input(out, kOp, "out"));
  });
}
