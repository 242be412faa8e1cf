// Scaled dot-product attention, the operators that F.scaled_dot_product_attention becomes: one on the CPU, three on
// CUDA. query, key and value are [batch, heads, length, width].
#include "kernels/attention.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "shims/attention_checks.h"
#include "shims/layout.h"
#ifdef UNTORCH_CUDA_KERNELS
#include "shims/attention_cuda.h"
#endif

using namespace untorch;
using namespace untorch::shims;
using namespace untorch::shims::attention;

namespace {

constexpr Op kFlashCpu{"_scaled_dot_product_flash_attention_for_cpu"};

template <class T>
kernels::cpu::HeadsRef<T> heads(const Tensor& tensor) {
  return {tensor.data<std::remove_const_t<T>>(), tensor.stride(0), tensor.stride(1), tensor.stride(2),
          tensor.stride(3)};
}

// The operand in the computing dtype; the kernels take any strides, so what has it already is not copied.
TensorPtr computable(const Tensor& tensor, DType compute) {
  return tensor.dtype() == compute ? std::make_unique<Tensor>(tensor) : to_dtype(tensor, compute);
}

void check_mask(const Tensor& mask, const Dims& sizes, DType query_dtype, DType compute) {
  check(mask.dtype() == query_dtype || mask.dtype() == compute, kFlashCpu, ": argument 'attn_mask' must be ",
        dtype_name(query_dtype), " like 'query', got ", dtype_name(mask.dtype()));
  check(mask.dim() == 2 || mask.dim() == 4, kFlashCpu, ": argument 'attn_mask' must be 2-D or 4-D, got shape ",
        to_string(mask.sizes()));
  for (std::int64_t d = 1; d <= mask.dim(); ++d) {
    check(mask.size(-d) == 1 || mask.size(-d) == sizes[static_cast<std::size_t>(4 - d)], kFlashCpu,
          ": argument 'attn_mask' of shape ", to_string(mask.sizes()), " does not broadcast to ", to_string(sizes));
  }
}

// The mask as [batch, heads, queries, keys] in the computing dtype, stride 0 where it broadcasts. What is expanded is
// not copied.
TensorPtr expanded_mask(const Tensor& mask, const Dims& sizes, DType compute) {
  Dims base_sizes{1, 1, 1, 1}, base_strides{0, 0, 0, 0};
  for (std::int64_t d = 1; d <= mask.dim(); ++d) {
    const auto to = static_cast<std::size_t>(4 - d);
    if (mask.size(-d) != 1 && mask.stride(-d) != 0) base_sizes[to] = mask.size(-d), base_strides[to] = mask.stride(-d);
  }
  const TensorPtr base = mask.view(base_sizes, base_strides, mask.storage_offset());
  const TensorPtr values = computable(*base, compute);
  Dims strides = values->strides();
  for (std::size_t d = 0; d < 4; ++d) {
    if (base_sizes[d] == 1) strides[d] = 0;
  }
  return values->view(sizes, strides, values->storage_offset());
}

template <class T, class Problem>
void attend(Problem p, const Operands& in, const Tensor* mask, const Tensor& out, const Tensor& lse, bool causal,
            double scale) {
  using Number = decltype(p.scale);
  p.batch = in.batch(), p.heads = in.heads(), p.kv_heads = in.key.size(1);
  p.queries = in.queries(), p.keys = in.keys(), p.width = in.query.size(3);
  p.scale = static_cast<Number>(scale), p.causal = causal;
  p.query = heads<const T>(in.query), p.key = heads<const T>(in.key), p.value = heads<const T>(in.value);
  if (mask != nullptr) p.mask = heads<const Number>(*mask);
  p.out = heads<T>(out);
  p.logsumexp = {lse.data<Number>(), lse.stride(0), lse.stride(1), lse.stride(2), 0};
  kernels::cpu::attention(p);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout_p, std::int32_t is_causal,
    AtenTensorHandle* attn_mask, double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1) {
  return guarded(kFlashCpu, [&] {
    const Operands in = operands(kFlashCpu, query, key, value, kHeadsFirst, {.widest = DType::kFloat64});
    const Tensor* mask = kFlashCpu.optional_input(attn_mask, "attn_mask");
    const DType dtype = in.query.dtype();
    const bool wide = dtype == DType::kFloat32 || dtype == DType::kFloat64;
    const DType compute = wide ? dtype : DType::kFloat32;
    const std::int64_t batch = in.batch(), head_count = in.heads(), queries = in.queries();
    const Dims mask_sizes{batch, head_count, queries, in.keys()};
    if (mask != nullptr) check_mask(*mask, mask_sizes, dtype, compute);
    check_inference(kFlashCpu, dropout_p, false);
    check_returns(kFlashCpu, {ret0, ret1});
    const Dims& sizes = in.query.sizes();
    TensorPtr out = Tensor::empty_strided(sizes, strides_like(in.query), dtype);
    TensorPtr lse =
        Tensor::empty_strided(Dims{batch, head_count, queries}, Dims{queries * head_count, 1, head_count}, compute);
    const TensorPtr expanded = mask == nullptr ? nullptr : expanded_mask(*mask, mask_sizes, compute);
    const double factor = scale_or_default(scale, in.query.size(3));
    const bool causal = is_causal != 0;
    if (dtype == DType::kFloat64) {
      attend<double>(kernels::cpu::Attention<double>{}, in, expanded.get(), *out, *lse, causal, factor);
    } else if (dtype == DType::kFloat32) {
      attend<float>(kernels::cpu::Attention<float>{}, in, expanded.get(), *out, *lse, causal, factor);
    } else {
      kernels::cpu::HalfAttention p{};
      p.type = dtype == DType::kBFloat16 ? kernels::HalfType::kBFloat16 : kernels::HalfType::kFloat16;
      attend<std::uint16_t>(p, in, expanded.get(), *out, *lse, causal, factor);
    }
    give(ret0, std::move(out), kFlashCpu);
    give(ret1, std::move(lse), kFlashCpu);
  });
}

#ifdef UNTORCH_CUDA_KERNELS
namespace {

constexpr Op kFlash{"_scaled_dot_product_flash_attention", DeviceType::kCUDA};
constexpr Op kEfficient{"_scaled_dot_product_efficient_attention", DeviceType::kCUDA};
constexpr Op kCudnn{"_scaled_dot_product_cudnn_attention", DeviceType::kCUDA};

// cuDNN's result: the query's order of dimensions with value's width.
Dims strides_in_order_of(const Tensor& query, DimSpan sizes) {
  Dims order{0, 1, 2, 3}, out{0, 0, 0, 0};
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int64_t a, std::int64_t b) { return query.stride(a) > query.stride(b); });
  std::int64_t next = 1;
  for (std::size_t i = 4; i-- > 0;) {
    const auto d = static_cast<std::size_t>(order[i]);
    out[d] = next;
    next *= sizes[d];
  }
  return out;
}

// Without dropout there is no random state; PyTorch keeps it on the CPU then.
void give_no_seed(AtenTensorHandle* seed, AtenTensorHandle* offset) {
  give_if_asked(seed, Tensor::scalar<std::int64_t>(0, DType::kInt64));
  give_if_asked(offset, Tensor::scalar<std::int64_t>(0, DType::kInt64));
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__scaled_dot_product_flash_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, double dropout_p, std::int32_t is_causal,
    std::int32_t return_debug_mask, double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
    AtenTensorHandle* ret2, AtenTensorHandle* ret3, std::int64_t* ret4, std::int64_t* ret5, AtenTensorHandle* ret6,
    AtenTensorHandle* ret7, AtenTensorHandle* ret8) {
  return guarded(kFlash, [&] {
    const Operands in = operands(kFlash, query, key, value, kHeadsFirst, {});
    check_inference(kFlash, dropout_p, return_debug_mask != 0);
    check_returns(kFlash, {ret0});
    const OnDevice on(kFlash, in.query, {&in.key, &in.value});
    const Dims strides = strides_like(in.query);
    TensorPtr out = empty_result(in.query.sizes(), strides, in.query);
    TensorPtr lse = Tensor::empty(Dims{in.batch(), in.heads(), in.queries()}, DType::kFloat32, on.device());
    RandomState random(on);
    kernels::cuda::Attention p = problem(in, scale);
    p.lse = lse->data<float>(), p.lse_batch = lse->stride(0), p.lse_head = lse->stride(1);
    p.empty_lse = std::numeric_limits<float>::infinity();
    p.random_state = random.state->data<std::uint64_t>();
    // FlashAttention's diagonal ends in the bottom right corner.
    if (is_causal != 0) p.right = 0, p.bottom_right = true;
    launch(on, kFlash, in, nullptr, *out, p);
    give(ret0, in_layout(std::move(out), strides), kFlash);
    give_if_asked(ret1, std::move(lse));
    give_if_asked(ret2, std::make_unique<Tensor>());
    give_if_asked(ret3, std::make_unique<Tensor>());
    if (ret4 != nullptr) *ret4 = in.queries();
    if (ret5 != nullptr) *ret5 = in.keys();
    give_if_asked(ret6, std::move(random.state));
    give_if_asked(ret7, std::move(random.unused));
    give_if_asked(ret8, Tensor::empty(Dims{0}, in.query.dtype(), on.device()));
  });
}

UNTORCH_SHIM aoti_torch_cuda__scaled_dot_product_efficient_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* attn_bias,
    std::int32_t compute_log_sumexp, double dropout_p, std::int32_t is_causal, double* scale, AtenTensorHandle* ret0,
    AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3) {
  return guarded(kEfficient, [&] {
    const Operands in = operands(kEfficient, query, key, value, kHeadsFirst,
                                 {.widest = DType::kFloat32, .groups = false, .value_width = true});
    const Tensor* bias = kEfficient.optional_input(attn_bias, "attn_bias");
    check_bias(kEfficient, bias, in);
    check_inference(kEfficient, dropout_p, false);
    check_returns(kEfficient, {ret0});
    const OnDevice on(kEfficient, in.query, {&in.key, &in.value, bias});
    const std::int64_t batch = in.batch(), heads = in.heads(), queries = in.queries(), width = in.value_width();
    // [batch, length, heads, width] in memory.
    Dims strides = contiguous_strides(Dims{batch, queries, heads, width});
    std::swap(strides[1], strides[2]);
    TensorPtr out = Tensor::empty_strided(Dims{batch, heads, queries, width}, strides, in.query.dtype(), on.device());
    const std::int64_t rows = compute_log_sumexp != 0 ? (queries + 31) / 32 * 32 : 0;
    TensorPtr lse = Tensor::empty(Dims{batch, heads, rows}, DType::kFloat32, on.device());
    kernels::cuda::Attention p = problem(in, scale);
    if (rows > 0) {
      p.lse = lse->data<float>(), p.lse_batch = lse->stride(0), p.lse_head = lse->stride(1);
      p.lse_rows = static_cast<int>(rows);
    }
    if (is_causal != 0) p.right = 0;
    launch(on, kEfficient, in, bias, *out, p);
    give(ret0, std::move(out), kEfficient);
    give_if_asked(ret1, std::move(lse));
    give_no_seed(ret2, ret3);
  });
}

UNTORCH_SHIM aoti_torch_cuda__scaled_dot_product_cudnn_attention(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* attn_bias,
    std::int32_t compute_log_sumexp, double dropout_p, std::int32_t is_causal, std::int32_t return_debug_mask,
    double* scale, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3,
    std::int64_t* ret4, std::int64_t* ret5, AtenTensorHandle* ret6, AtenTensorHandle* ret7, AtenTensorHandle* ret8) {
  return guarded(kCudnn, [&] {
    const Operands in = operands(kCudnn, query, key, value, kHeadsFirst, {.value_width = true});
    const Tensor* bias = kCudnn.optional_input(attn_bias, "attn_bias");
    check_bias(kCudnn, bias, in);
    check_inference(kCudnn, dropout_p, return_debug_mask != 0);
    check_returns(kCudnn, {ret0});
    const OnDevice on(kCudnn, in.query, {&in.key, &in.value, bias});
    const Dims sizes{in.batch(), in.heads(), in.queries(), in.value_width()};
    const Dims strides = sizes == in.query.sizes() ? strides_like(in.query) : strides_in_order_of(in.query, sizes);
    TensorPtr out = empty_result(sizes, strides, in.query);
    TensorPtr lse = Tensor::empty(Dims{in.batch(), in.heads(), in.queries(), 1}, DType::kFloat32, on.device());
    kernels::cuda::Attention p = problem(in, scale);
    // PyTorch leaves it undefined when it is not asked for; its shape is known all the same.
    if (compute_log_sumexp != 0) p.lse = lse->data<float>(), p.lse_batch = lse->stride(0), p.lse_head = lse->stride(1);
    p.empty_lse = -std::numeric_limits<float>::infinity();
    if (is_causal != 0) p.right = 0;
    launch(on, kCudnn, in, bias, *out, p);
    give(ret0, in_layout(std::move(out), strides), kCudnn);
    give_if_asked(ret1, std::move(lse));
    give_if_asked(ret2, std::make_unique<Tensor>());
    give_if_asked(ret3, std::make_unique<Tensor>());
    if (ret4 != nullptr) *ret4 = in.queries();
    if (ret5 != nullptr) *ret5 = in.keys();
    give_no_seed(ret6, ret7);
    give_if_asked(ret8, std::make_unique<Tensor>());
  });
}
#endif
