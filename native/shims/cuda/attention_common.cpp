// The contract of query, key and value, and the launch.
#include <limits>

#include "shims/cuda/attention.h"
#include "shims/layout.h"
#include "tensor/device.h"

namespace untorch::shims::attention {
namespace {

using kernels::cuda::kMaxAttentionLength;
using kernels::cuda::kMaxAttentionWidth;

std::int64_t lanes_of(DType dtype) { return 16 / static_cast<std::int64_t>(element_size(dtype)); }

// Whether the kernels can read rows of 16-byte chunks where they are. A row that ends within a chunk may be the last of
// its memory.
bool in_place(const Tensor& t) {
  if (t.numel() == 0) return true;
  const std::int64_t last = t.dim() - 1, lanes = lanes_of(t.dtype());
  if (t.size(last) % lanes != 0) return false;
  if (t.size(last) > 1 && t.stride(last) != 1) return false;
  for (std::int64_t d = 0; d < last; ++d) {
    if (t.size(d) > 1 && t.stride(d) % lanes != 0) return false;
  }
  return reinterpret_cast<std::uintptr_t>(t.raw()) % 16 == 0;
}

// A copy with rows padded to whole chunks, or another handle on the tensor.
TensorPtr readable(const Tensor& t) {
  if (in_place(t)) return std::make_unique<Tensor>(t);
  const std::int64_t lanes = lanes_of(t.dtype());
  Dims strides;
  strides.resize(t.sizes().size());
  std::int64_t next = 1;
  for (std::int64_t d = t.dim() - 1; d >= 0; --d) {
    strides[static_cast<std::size_t>(d)] = next;
    next *= d == t.dim() - 1 ? (t.size(d) + lanes - 1) / lanes * lanes : t.size(d);
  }
  TensorPtr out = Tensor::empty_strided(t.sizes(), strides, t.dtype(), t.device());
  copy(*out, t);
  return out;
}

kernels::cuda::Heads heads_of(const Tensor& t, const Axes& axes) {
  const auto stride = [&](std::int64_t d) { return d < 0 || t.size(d) <= 1 ? 0 : t.stride(d); };
  return {t.raw(), stride(axes.batch), stride(axes.head), stride(axes.row)};
}

void check_operand(const char* op, const char* name, const Tensor& t, const Tensor& query, const Axes& axes) {
  check(t.dim() == (axes.batch < 0 ? 3 : 4), op, ": argument '", name, "' must be ", axes.names, ", got shape ",
        to_string(t.sizes()));
  check(t.dtype() == query.dtype(), op, ": argument '", name, "' must be ", dtype_name(query.dtype()),
        " like 'query', got ", dtype_name(t.dtype()));
  check(t.size(-1) >= 1 && t.size(-1) <= kMaxAttentionWidth, op, ": argument '", name, "' must have a width of 1 to ",
        kMaxAttentionWidth, ", got shape ", to_string(t.sizes()));
  check(t.size(axes.row) <= kMaxAttentionLength, op, ": argument '", name, "' must have at most ", kMaxAttentionLength,
        " rows a head, got shape ", to_string(t.sizes()));
}

}  // namespace

Operands operands(const char* op, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, Axes axes,
                  Accepts accepts) {
  const Tensor& q = cuda_input(query, op, "query");
  const Tensor& k = cuda_input(key, op, "key");
  const Tensor& v = cuda_input(value, op, "value");
  const bool half = q.dtype() == DType::kFloat16 || q.dtype() == DType::kBFloat16;
  if (!half && !(accepts.float32 && q.dtype() == DType::kFloat32)) {
    throw_error(ErrorKind::kUnsupported, op, ": argument 'query' must be float16", accepts.float32 ? ", " : " or ",
                "bfloat16", accepts.float32 ? " or float32" : "", ", got ", dtype_name(q.dtype()));
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
  check((axes.batch < 0 ? 1 : q.size(0)) <= kMaxInt && heads <= kMaxInt, op, ": argument 'query' has a batch of shape ",
        to_string(q.sizes()), ", at most ", kMaxInt, " sequences and heads are served");
  return {q, k, v, axes};
}

TensorPtr empty_result(const Dims& sizes, const Dims& strides, const Tensor& query) {
  const bool dense_rows = sizes[sizes.size() - 1] == 1 || strides[strides.size() - 1] == 1;
  return Tensor::empty_strided(sizes, dense_rows ? strides : contiguous_strides(sizes), query.dtype(), query.device());
}

TensorPtr in_layout(TensorPtr out, const Dims& strides) {
  if (out->strides() == strides) return out;
  TensorPtr laid = Tensor::empty_strided(out->sizes(), strides, out->dtype(), out->device());
  copy(*laid, *out);
  return laid;
}

void check_inference(const char* op, double dropout_p, bool return_debug_mask) {
  if (dropout_p != 0.0) {
    throw_error(ErrorKind::kUnsupported, op, ": dropout_p must be 0, got ", dropout_p,
                "; export the model in eval mode");
  }
  if (return_debug_mask) {
    throw_error(ErrorKind::kUnsupported, op,
                ": return_debug_mask must be false; it needs dropout, which is not served");
  }
}

void check_bias(const char* op, const Tensor* bias, const Operands& in) {
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

void check_lengths(const char* op, const char* argument, const Tensor* lengths, std::int64_t count) {
  if (lengths == nullptr) return;
  check(lengths->dtype() == DType::kInt32, op, ": argument '", argument, "' must be int32, got ",
        dtype_name(lengths->dtype()));
  check(lengths->dim() == 1 && lengths->size(0) == count && lengths->is_contiguous(), op, ": argument '", argument,
        "' must be 1-D with ", count, " values and no gaps, got shape ", to_string(lengths->sizes()), " and strides ",
        to_string(lengths->strides()));
}

void check_returns(const char* op, std::initializer_list<const void*> slots) {
  for (const void* slot : slots) check(slot != nullptr, op, ": output pointer is null");
}

kernels::cuda::Attention problem(const Operands& in, const double* scale) {
  kernels::cuda::Attention p;
  p.dtype = in.query.dtype();
  p.batch = static_cast<int>(in.batch()), p.heads = static_cast<int>(in.heads());
  p.kv_heads = static_cast<int>(in.key.size(in.axes.head));
  p.queries = static_cast<int>(in.queries()), p.keys = static_cast<int>(in.keys());
  p.width = static_cast<int>(in.query.size(-1)), p.value_width = static_cast<int>(in.value_width());
  p.scale = static_cast<float>(scale != nullptr ? *scale : 1.0 / std::sqrt(static_cast<double>(p.width)));
  return p;
}

void run(const OnDevice& on, const char* op, const Operands& in, const Tensor* bias, const Tensor& out,
         kernels::cuda::Attention p) {
  if (p.batch == 0 || p.heads == 0 || p.queries == 0) {
    if (p.random_state != nullptr) {
      cuda::check_driver(cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(p.random_state), 0,
                                                        3 * sizeof(std::uint64_t), on.stream()),
                         op);
    }
    return;
  }
  const TensorPtr query = readable(in.query), key = readable(in.key), value = readable(in.value);
  p.query = heads_of(*query, in.axes), p.key = heads_of(*key, in.axes), p.value = heads_of(*value, in.axes);
  p.out = heads_of(out, in.axes);
  if (bias != nullptr) {
    const auto stride = [&](std::int64_t d) { return d > bias->dim() || bias->size(-d) == 1 ? 0 : bias->stride(-d); };
    p.bias = bias->raw();
    p.bias_batch = stride(4), p.bias_head = stride(3), p.bias_row = stride(2), p.bias_key = stride(1);
  }
  const cuda::DeviceProperties& device = on.properties();
  const kernels::cuda::AttentionPlan plan = kernels::cuda::plan_attention(p, device.num_sms, device.l2_bytes);
  check(plan.valid, op, ": the shapes ", to_string(in.query.sizes()), " and ", to_string(in.key.sizes()),
        " are larger than the kernels take");
  StorageRef scratch;
  if (plan.scratch_bytes > 0) scratch = on.scratch(plan.scratch_bytes);
  on.launched(kernels::cuda::attention(p, plan, scratch ? scratch->data() : nullptr, on.stream()));
}

RandomState::RandomState(const OnDevice& on) {
  const TensorPtr words = Tensor::empty(Dims{3}, DType::kUInt64, on.device());
  state = words->view(Dims{2}, Dims{1}, 0);
  unused = words->view(Dims{}, Dims{}, 2);
}

}  // namespace untorch::shims::attention
