// Scaled dot-product attention, the operators that F.scaled_dot_product_attention becomes: query, key and value are
// [batch, heads, length, width].
#include "shims/cuda/attention.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "shims/layout.h"

using namespace untorch;
using namespace untorch::shims;
using namespace untorch::shims::attention;

namespace {

constexpr const char* kFlash = "_scaled_dot_product_flash_attention";
constexpr const char* kEfficient = "_scaled_dot_product_efficient_attention";
constexpr const char* kCudnn = "_scaled_dot_product_cudnn_attention";

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
    run(on, kFlash, in, nullptr, *out, p);
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
    const Operands in =
        operands(kEfficient, query, key, value, kHeadsFirst, {.float32 = true, .groups = false, .value_width = true});
    const Tensor* bias = optional_cuda_input(attn_bias, kEfficient, "attn_bias");
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
    run(on, kEfficient, in, bias, *out, p);
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
    const Tensor* bias = optional_cuda_input(attn_bias, kCudnn, "attn_bias");
    check_bias(kCudnn, bias, in);
    check_inference(kCudnn, dropout_p, return_debug_mask != 0);
    check_returns(kCudnn, {ret0});
    const OnDevice on(kCudnn, in.query, {&in.key, &in.value, bias});
    const Dims sizes{in.batch(), in.heads(), in.queries(), in.value_width()};
    const Dims strides = sizes == in.query.sizes() ? strides_like(in.query) : strides_in_order_of(in.query, sizes);
    TensorPtr out = empty_result(sizes, strides, in.query);
    TensorPtr lse = Tensor::empty(Dims{in.batch(), in.heads(), in.queries(), 1}, DType::kFloat32, on.device());
    kernels::cuda::Attention p = problem(in, scale);
    // PyTorch leaves it undefined when it is not asked for; its shape is known all the same, and it costs nothing.
    (void)compute_log_sumexp;
    p.lse = lse->data<float>(), p.lse_batch = lse->stride(0), p.lse_head = lse->stride(1);
    p.empty_lse = -std::numeric_limits<float>::infinity();
    if (is_causal != 0) p.right = 0;
    run(on, kCudnn, in, bias, *out, p);
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
