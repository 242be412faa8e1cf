// The contract of query, key and value, on every device.
#include "shims/attention_checks.h"

#include <cmath>
#include <limits>

#include "kernels/attention.h"

namespace untorch::shims::attention {
namespace {

using kernels::cuda::kMaxAttentionLength;
using kernels::cuda::kMaxAttentionWidth;

void check_operand(const Op& op, const char* name, const Tensor& t, const Tensor& query, const Axes& axes) {
  check(t.dim() == (axes.batch < 0 ? 3 : 4), op, ": argument '", name, "' must be ", axes.names, ", got shape ",
        to_string(t.sizes()));
  check(t.dtype() == query.dtype(), op, ": argument '", name, "' must be ", dtype_name(query.dtype()),
        " like 'query', got ", dtype_name(t.dtype()));
  if (!op.on_cuda()) return;
  check(t.size(-1) >= 1 && t.size(-1) <= kMaxAttentionWidth, op, ": argument '", name, "' must have a width of 1 to ",
        kMaxAttentionWidth, ", got shape ", to_string(t.sizes()));
  check(t.size(axes.row) <= kMaxAttentionLength, op, ": argument '", name, "' must have at most ", kMaxAttentionLength,
        " rows a head, got shape ", to_string(t.sizes()));
}

}  // namespace

Operands operands(const Op& op, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, Axes axes,
                  Accepts accepts) {
  const Tensor& q = op.input(query, "query");
  const Tensor& k = op.input(key, "key");
  const Tensor& v = op.input(value, "value");
  const auto rank = [](DType dtype) { return dtype == DType::kFloat64 ? 2 : dtype == DType::kFloat32 ? 1 : 0; };
  if (!is_floating(q.dtype()) || rank(q.dtype()) > rank(accepts.widest)) {
    constexpr const char* kServed[] = {"float16 or bfloat16", "float16, bfloat16 or float32",
                                       "float16, bfloat16, float32 or float64"};
    throw_error(ErrorKind::kUnsupported, op, ": argument 'query' must be ", kServed[rank(accepts.widest)], ", got ",
                dtype_name(q.dtype()));
  }
  check_operand(op, "query", q, q, axes);
  check_operand(op, "key", k, q, axes);
  check_operand(op, "value", v, q, axes);
  check(k.size(-1) == q.size(-1), op, ": argument 'key' must have the width ", q.size(-1), " of 'query', got shape ",
        to_string(k.sizes()));
  check(accepts.value_width || v.size(-1) == q.size(-1), op, ": argument 'value' must have the width ", q.size(-1),
        " of 'query', got shape ", to_string(v.sizes()));
  check(k.size(axes.head) == v.size(axes.head) && k.size(axes.row) == v.size(axes.row), op,
        ": 'key' and 'value' must agree in heads and length, got ", to_string(k.sizes()), " and ",
        to_string(v.sizes()));
  if (axes.batch >= 0) {
    check(k.size(0) == q.size(0) && v.size(0) == q.size(0), op, ": the batch sizes differ: 'query' is ",
          to_string(q.sizes()), ", 'key' is ", to_string(k.sizes()), ", 'value' is ", to_string(v.sizes()));
  }
  const std::int64_t heads = q.size(axes.head), kv_heads = k.size(axes.head);
  if (accepts.groups) {
    check(kv_heads > 0 ? heads % kv_heads == 0 : heads == 0, op, ": the ", heads,
          " heads of 'query' must be a multiple of the ", kv_heads, " heads of 'key'");
  } else {
    check(heads == kv_heads, op, ": 'query' and 'key' must have the same number of heads, got ", heads, " and ",
          kv_heads);
  }
  constexpr std::int64_t kMaxInt = std::numeric_limits<int>::max();
  check(!op.on_cuda() || ((axes.batch < 0 ? 1 : q.size(0)) <= kMaxInt && heads <= kMaxInt), op,
        ": argument 'query' has a batch of shape ", to_string(q.sizes()), ", at most ", kMaxInt,
        " sequences and heads are served");
  return {q, k, v, axes};
}

void check_inference(const Op& op, double dropout_p, bool return_debug_mask) {
  if (dropout_p != 0.0) {
    throw_error(ErrorKind::kUnsupported, op, ": dropout_p must be 0, got ", dropout_p,
                "; export the model in eval mode");
  }
  if (return_debug_mask) {
    throw_error(ErrorKind::kUnsupported, op,
                ": return_debug_mask must be false; it needs dropout, which is not served");
  }
}

void check_bias(const Op& op, const Tensor* bias, const Operands& in) {
  if (bias == nullptr) return;
  check(bias->dtype() == in.query.dtype(), op, ": argument 'attn_bias' must be ", dtype_name(in.query.dtype()),
        " like 'query', got ", dtype_name(bias->dtype()));
  const Dims full{in.batch(), in.heads(), in.queries(), in.keys()};
  check(bias->dim() <= 4, op, ": argument 'attn_bias' must have at most 4 dimensions, got shape ",
        to_string(bias->sizes()));
  for (std::int64_t d = 1; d <= bias->dim(); ++d) {
    check(bias->size(-d) == 1 || bias->size(-d) == full[static_cast<std::size_t>(4 - d)], op,
          ": argument 'attn_bias' of shape ", to_string(bias->sizes()), " does not broadcast to ", to_string(full));
  }
}

void check_lengths(const Op& op, const char* argument, const Tensor* lengths, std::int64_t count) {
  if (lengths == nullptr) return;
  check(lengths->dtype() == DType::kInt32, op, ": argument '", argument, "' must be int32, got ",
        dtype_name(lengths->dtype()));
  check(lengths->dim() == 1 && lengths->size(0) == count && lengths->is_contiguous(), op, ": argument '", argument,
        "' must be 1-D with ", count, " values and no gaps, got shape ", to_string(lengths->sizes()), " and strides ",
        to_string(lengths->strides()));
}

void check_returns(const Op& op, std::initializer_list<const void*> slots) {
  for (const void* slot : slots) check(slot != nullptr, op, ": output pointer is null");
}

double scale_or_default(const double* scale, std::int64_t width) {
  if (scale != nullptr) return *scale;
  return width == 0 ? 1.0 : 1.0 / std::sqrt(static_cast<double>(width));
}

}  // namespace untorch::shims::attention
