// The checks that products with NVFP4 weights on the CPU and on GPUs share.
#include "shims/nvfp4_checks.h"

#include <cmath>
#include <limits>
#include <string_view>

namespace untorch::shims {
namespace {

void check_is(const char* op, const char* argument, const Tensor& tensor, DType dtype, const Dims& sizes) {
  check(tensor.dtype() == dtype, op, ": argument '", argument, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
  check(tensor.sizes() == sizes, op, ": argument '", argument, "' must have shape ", to_string(sizes), ", got ",
        to_string(tensor.sizes()));
  check(tensor.is_contiguous(), op, ": argument '", argument, "' must be contiguous, got shape ",
        to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

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

void check_float(const char* op, const char* argument, double number) {
  check(std::abs(number) <= static_cast<double>(std::numeric_limits<float>::max()), op, ": argument '", argument,
        "' must be a finite number of float32, got ", number);
}

}  // namespace

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

kernels::Nvfp4Prefill check_prefill(const char* op, const char* prefill) {
  check(prefill != nullptr, op, ": argument 'prefill' is null");
  const std::string_view name = prefill;
  if (name == "exact") return kernels::Nvfp4Prefill::kExact;
  if (name == "fp8") return kernels::Nvfp4Prefill::kFloat8;
  check(name == "fp4", op, ": argument 'prefill' must be exact, fp8 or fp4, got '", name, "'");
  return kernels::Nvfp4Prefill::kFloat4;
}

float Nvfp4MoeArguments::limit() const {
  constexpr float kNone = std::numeric_limits<float>::infinity();
  return swiglu_limit == nullptr || *swiglu_limit > static_cast<double>(std::numeric_limits<float>::max())
             ? kNone
             : static_cast<float>(*swiglu_limit);
}

Nvfp4MoeShape check_nvfp4_moe(const char* op, const Nvfp4MoeArguments& given) {
  check_float_rows(op, "hidden_states", given.hidden_states);
  check_rank(op, "hidden_states", given.hidden_states, 2);
  check_rank(op, "topk_weights", given.topk_weights, 2);
  check_rank(op, "w13", given.w13, 3);
  Nvfp4MoeShape out;
  out.tokens = given.hidden_states.size(0), out.k = given.hidden_states.size(1);
  out.experts = given.w13.size(0), out.width = given.w13.size(1) / 2, out.top_k = given.topk_weights.size(1);
  check(out.k > 0 && out.k % kNvfp4Block == 0, op,
        ": argument 'hidden_states' must have a multiple of 16 in its last dimension, got shape ",
        to_string(given.hidden_states.sizes()));
  check(out.width > 0 && out.width % kNvfp4Block == 0 && given.w13.size(1) % 2 == 0, op,
        ": argument 'w13' must have two times a multiple of 16 rows, got shape ", to_string(given.w13.sizes()));
  const std::int64_t e = out.experts, k = out.k, i = out.width;
  check_is(op, "topk_weights", given.topk_weights, DType::kFloat32, Dims{out.tokens, out.top_k});
  check_is(op, "topk_ids", given.topk_ids, DType::kInt32, Dims{out.tokens, out.top_k});
  check_is(op, "w13", given.w13, DType::kUInt8, Dims{e, 2 * i, k / 2});
  check_is(op, "w13_scale", given.w13_scale, DType::kFloat8E4M3FN, Dims{e, 2 * i, k / kNvfp4Block});
  check_is(op, "w2", given.w2, DType::kUInt8, Dims{e, k, i / 2});
  check_is(op, "w2_scale", given.w2_scale, DType::kFloat8E4M3FN, Dims{e, k, i / kNvfp4Block});
  out.two_scales = given.w13_global.dim() == 2;
  check_is(op, "w13_global", given.w13_global, DType::kFloat32, out.two_scales ? Dims{e, 2} : Dims{e});
  check_is(op, "w2_global", given.w2_global, DType::kFloat32, Dims{e});
  if (given.w13_bias != nullptr) check_is(op, "w13_bias", *given.w13_bias, DType::kFloat32, Dims{e, 2 * i});
  if (given.w2_bias != nullptr) check_is(op, "w2_bias", *given.w2_bias, DType::kFloat32, Dims{e, k});
  check_float(op, "swiglu_alpha", given.swiglu_alpha);
  check_float(op, "swiglu_beta", given.swiglu_beta);
  check(given.swiglu_limit == nullptr || *given.swiglu_limit > 0.0, op,
        ": argument 'swiglu_limit' must be above 0, or null for no limit, got ",
        given.swiglu_limit == nullptr ? 0.0 : *given.swiglu_limit);
  return out;
}

}  // namespace untorch::shims
