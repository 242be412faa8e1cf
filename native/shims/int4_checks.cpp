// The checks that products with int4 weights on the CPU and on GPUs share.
#include "shims/int4_checks.h"

namespace untorch::shims {
namespace {

// The arguments' names in an operator's schema.
struct Names {
  const char *x, *weight, *group, *scales;
};

void check_dense(const char* op, const char* argument, const Tensor& tensor) {
  check(tensor.is_contiguous(), op, ": argument '", argument, "' must be contiguous, got shape ",
        to_string(tensor.sizes()), " with strides ", to_string(tensor.strides()));
}

// n, k, inner_k_tiles and the group, from the weight and its scales.
Int4Shape check_weight(const char* op, const Names& names, const Tensor& weight, std::int64_t group,
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

bool is_served(DType dtype) { return is_floating(dtype) && dtype != DType::kFloat64; }

}  // namespace

Int4Shape check_int4pack(const char* op, const Tensor& x, const Tensor& weight, std::int64_t group,
                         const Tensor& scales) {
  check(x.dtype() == DType::kBFloat16, op, ": argument 'self' must be bfloat16, got ", dtype_name(x.dtype()));
  check(x.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(x.sizes()));
  check_dense(op, "self", x);
  Int4Shape out = check_weight(op, {"self", "mat2", "qGroupSize", "qScaleAndZeros"}, weight, group, scales);
  check(scales.dtype() == DType::kBFloat16, op, ": argument 'qScaleAndZeros' must be bfloat16, got ",
        dtype_name(scales.dtype()));
  check(x.size(1) == out.k, op, ": the inner sizes differ: 'self' is ", to_string(x.sizes()), ", 'mat2' of shape ",
        to_string(weight.sizes()), " holds k = ", out.k);
  out.m = x.size(0);
  out.x_width = out.k;
  out.out_sizes = Dims{out.m, out.n};
  return out;
}

Int4Shape check_int4_weight(const char* op, const Tensor& weight, const Tensor& scales, std::int64_t group) {
  Int4Shape out = check_weight(op, {"x", "weight", "group_size", "scale_and_zero"}, weight, group, scales);
  check(is_served(scales.dtype()), op, ": argument 'scale_and_zero' must be float32, bfloat16 or float16, got ",
        dtype_name(scales.dtype()));
  return out;
}

Int4Shape check_int4_linear(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scales,
                            std::int64_t group, const Tensor* bias) {
  check_float_rows(op, "x", x);
  Int4Shape out = check_int4_weight(op, weight, scales, group);
  check(x.size(-1) <= out.k, op, ": argument 'x' has ", x.size(-1), " features, 'weight' of shape ",
        to_string(weight.sizes()), " takes at most k = ", out.k);
  if (bias != nullptr) check_bias(op, *bias, out.n, x.dtype());
  out.x_width = x.size(-1);
  out.m = rows_before_last(x);
  out.out_sizes = x.sizes();
  out.out_sizes[out.out_sizes.size() - 1] = out.n;
  return out;
}

}  // namespace untorch::shims
