// Scaled dot-product attention on the CPU.
#include "kernels/cpu/attention/attention.h"

#include <cmath>

#include "shims/layout.h"
#include "shims/shim.h"

namespace untorch::shims {
namespace {

constexpr const char* kOp = "_scaled_dot_product_flash_attention_for_cpu";

template <class T>
kernels::HeadsRef<T> heads(const Tensor& tensor) {
  return {tensor.data<std::remove_const_t<T>>(), tensor.stride(0), tensor.stride(1), tensor.stride(2),
          tensor.stride(3)};
}

// The operand in the computing dtype; the kernels take any strides, so what has it already is not copied.
TensorPtr computable(const Tensor& tensor, DType compute) {
  return tensor.dtype() == compute ? std::make_unique<Tensor>(tensor) : to_dtype(tensor, compute);
}

// The mask as [batch, heads, queries, keys] in the computing dtype, stride 0 where it broadcasts. What is expanded is
// not copied.
TensorPtr expanded_mask(const Tensor& mask, const Dims& sizes, DType query_dtype, DType compute) {
  check(mask.dtype() == query_dtype || mask.dtype() == compute, kOp, ": argument 'attn_mask' must be ",
        dtype_name(query_dtype), " like 'query', got ", dtype_name(mask.dtype()));
  check(mask.dim() == 2 || mask.dim() == 4, kOp, ": argument 'attn_mask' must be 2-D or 4-D, got shape ",
        to_string(mask.sizes()));
  Dims base_sizes{1, 1, 1, 1}, base_strides{0, 0, 0, 0};
  const std::int64_t missing = 4 - mask.dim();
  for (std::int64_t d = 0; d < mask.dim(); ++d) {
    const auto to = static_cast<std::size_t>(d + missing);
    check(mask.size(d) == 1 || mask.size(d) == sizes[to], kOp, ": argument 'attn_mask' of shape ",
          to_string(mask.sizes()), " does not broadcast to ", to_string(sizes));
    if (mask.size(d) != 1 && mask.stride(d) != 0) base_sizes[to] = mask.size(d), base_strides[to] = mask.stride(d);
  }
  const TensorPtr base = mask.view(base_sizes, base_strides, mask.storage_offset());
  const TensorPtr values = computable(*base, compute);
  Dims strides = values->strides();
  for (std::size_t d = 0; d < 4; ++d) {
    if (base_sizes[d] == 1) strides[d] = 0;
  }
  return values->view(sizes, strides, values->storage_offset());
}

template <class T>
void run(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor* mask, const Tensor& out,
         const Tensor& lse, bool causal, double scale) {
  kernels::Attention<T> p{};
  p.batch = query.size(0), p.heads = query.size(1), p.kv_heads = key.size(1);
  p.queries = query.size(2), p.keys = key.size(2), p.width = query.size(3);
  p.scale = static_cast<T>(scale), p.causal = causal;
  p.query = heads<const T>(query), p.key = heads<const T>(key), p.value = heads<const T>(value);
  if (mask != nullptr) p.mask = heads<const T>(*mask);
  p.out = heads<T>(out);
  p.logsumexp = {lse.data<T>(), lse.stride(0), lse.stride(1), lse.stride(2), 0};
  kernels::attention(p);
}

void check_operand(const char* name, const Tensor& tensor, const Tensor& query) {
  check(tensor.dim() == 4, kOp, ": argument '", name, "' must be 4-D (batch, heads, length, width), got shape ",
        to_string(tensor.sizes()));
  check(tensor.dtype() == query.dtype(), kOp, ": argument '", name, "' must be ", dtype_name(query.dtype()),
        " like 'query', got ", dtype_name(tensor.dtype()));
  check(tensor.size(3) == query.size(3), kOp, ": argument '", name, "' must have the width ", query.size(3),
        " of 'query', got shape ", to_string(tensor.sizes()));
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout_p, std::int32_t is_causal,
    AtenTensorHandle* attn_mask, double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(kOp, [&] {
    const Tensor& q = cpu_input(query, kOp, "query");
    const Tensor& k = cpu_input(key, kOp, "key");
    const Tensor& v = cpu_input(value, kOp, "value");
    const Tensor* mask = optional_cpu_input(attn_mask, kOp, "attn_mask");
    if (!is_floating(q.dtype())) {
      throw_error(ErrorKind::kUnsupported, kOp,
                  ": argument 'query' must be float32, float64, bfloat16 or float16, got ", dtype_name(q.dtype()));
    }
    check_operand("query", q, q);
    check_operand("key", k, q);
    check_operand("value", v, q);
    if (dropout_p != 0.0) {
      throw_error(ErrorKind::kUnsupported, kOp, ": dropout_p must be 0, got ", dropout_p,
                  "; export the model in eval mode");
    }
    check(k.size(1) == v.size(1) && k.size(2) == v.size(2), kOp,
          ": 'key' and 'value' must agree in heads and length, got ", to_string(k.sizes()), " and ",
          to_string(v.sizes()));
    check(k.size(0) == q.size(0) && v.size(0) == q.size(0), kOp, ": the batch sizes differ: 'query' is ",
          to_string(q.sizes()), ", 'key' is ", to_string(k.sizes()), ", 'value' is ", to_string(v.sizes()));
    check(k.size(1) > 0 ? q.size(1) % k.size(1) == 0 : q.size(1) == 0, kOp, ": the ", q.size(1),
          " heads of 'query' must be a multiple of the ", k.size(1), " of 'key'");
    const bool wide = q.dtype() == DType::kFloat32 || q.dtype() == DType::kFloat64;
    const DType compute = wide ? q.dtype() : DType::kFloat32;
    const std::int64_t batch = q.size(0), head_count = q.size(1), queries = q.size(2);
    TensorPtr out = Tensor::empty_strided(q.sizes(), strides_like(q), q.dtype());
    TensorPtr lse =
        Tensor::empty_strided(Dims{batch, head_count, queries}, Dims{queries * head_count, 1, head_count}, compute);
    const TensorPtr wide_q = computable(q, compute), wide_k = computable(k, compute), wide_v = computable(v, compute);
    TensorPtr wide_mask;
    if (mask != nullptr)
      wide_mask = expanded_mask(*mask, Dims{batch, head_count, queries, k.size(2)}, q.dtype(), compute);
    const TensorPtr result = wide ? std::make_unique<Tensor>(*out) : Tensor::empty(q.sizes(), compute);
    const double factor = scale != nullptr ? *scale
                          : q.size(3) == 0 ? 1.0
                                           : 1.0 / std::sqrt(static_cast<double>(q.size(3)));
    if (compute == DType::kFloat64) {
      run<double>(*wide_q, *wide_k, *wide_v, wide_mask.get(), *result, *lse, is_causal != 0, factor);
    } else {
      run<float>(*wide_q, *wide_k, *wide_v, wide_mask.get(), *result, *lse, is_causal != 0, factor);
    }
    if (!wide) copy_cpu(*out, *result);
    give(ret0, std::move(out), kOp);
    give(ret1, std::move(lse), kOp);
  });
}

}  // namespace untorch::shims
