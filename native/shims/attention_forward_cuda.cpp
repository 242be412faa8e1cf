// CUDA's attention operators below F.scaled_dot_product_attention: query, key and value are [batch, length, heads,
// width], or sequences of different lengths packed along the rows, with the first row of each.
#include <limits>

#include "shims/attention_cuda.h"
#include "shims/layout.h"

using namespace untorch;
using namespace untorch::shims;
using namespace untorch::shims::attention;

namespace {

struct Flash {
  Op op;
  AtenTensorHandle query, key, value;
  AtenTensorHandle *cum_seq_q, *cum_seq_k;
  std::int64_t max_q, max_k;
  double dropout_p;
  bool is_causal, return_debug_mask;
  const double* scale;
  const std::int64_t *window_left, *window_right;
  AtenTensorHandle *seqused_k, *alibi_slopes, *block_table;
};

bool present(AtenTensorHandle* handle) { return handle != nullptr && *handle != nullptr && unwrap(*handle)->defined(); }

void refuse(const Op& op, const char* argument, bool given) {
  if (given) throw_error(ErrorKind::kUnsupported, op, ": argument '", argument, "' is not served; it must be absent");
}

// The longest sequence as an int; negative and too long ones are refused.
int longest(const Op& op, const char* argument, std::int64_t length) {
  check(length >= 0 && length <= kernels::cuda::kMaxAttentionLength, op, ": argument '", argument,
        "' must be from 0 to ", kernels::cuda::kMaxAttentionLength, ", got ", length);
  return static_cast<int>(length);
}

// A limit of the window; none and a negative one are no limit.
int window(const std::int64_t* limit) {
  if (limit == nullptr || *limit < 0) return -1;
  return static_cast<int>(std::min<std::int64_t>(*limit, kernels::cuda::kMaxAttentionLength));
}

// Into `into`, or into a new tensor like the query when it is null.
void flash(const Flash& call, AtenTensorHandle into, AtenTensorHandle* out_slot, AtenTensorHandle* lse_slot,
           AtenTensorHandle* state_slot, AtenTensorHandle* unused_slot, AtenTensorHandle* debug_slot) {
  const Op& op = call.op;
  const Tensor* first_query = op.optional_input(call.cum_seq_q, "cum_seq_q");
  const Tensor* first_key = op.optional_input(call.cum_seq_k, "cum_seq_k");
  const Tensor* used_keys = op.optional_input(call.seqused_k, "seqused_k");
  check((first_query == nullptr) == (first_key == nullptr), op,
        ": 'cum_seq_q' and 'cum_seq_k' must be both given or both absent");
  const bool packed = first_query != nullptr;
  const Operands in = operands(op, call.query, call.key, call.value, packed ? kPacked : kRowsFirst, {});
  check_inference(op, call.dropout_p, call.return_debug_mask);
  refuse(op, "alibi_slopes", present(call.alibi_slopes));
  refuse(op, "block_table", present(call.block_table));
  std::int64_t batch = in.batch();
  if (packed) {
    check(first_query->dim() == 1 && first_query->size(0) >= 1, op,
          ": argument 'cum_seq_q' must be 1-D with at least one value, got shape ", to_string(first_query->sizes()));
    batch = first_query->size(0) - 1;
    check_lengths(op, "cum_seq_q", first_query, batch + 1);
    check_lengths(op, "cum_seq_k", first_key, batch + 1);
  }
  check_lengths(op, "seqused_k", used_keys, batch);
  const Tensor* given = nullptr;
  if (into != nullptr) {
    given = &op.input(into, "out");
    check(given->sizes() == in.query.sizes() && given->dtype() == in.query.dtype(), op,
          ": argument 'out' must have the shape ", to_string(in.query.sizes()), " and the dtype ",
          dtype_name(in.query.dtype()), " of 'query', got ", to_string(given->sizes()), " and ",
          dtype_name(given->dtype()));
    check(given->size(-1) == 1 || given->stride(-1) == 1, op,
          ": the last dimension of argument 'out' must have stride 1, got strides ", to_string(given->strides()));
  }
  kernels::cuda::Attention p = problem(in, call.scale);
  if (packed) {
    p.batch = static_cast<int>(batch);
    p.queries = longest(op, "max_q", call.max_q), p.keys = longest(op, "max_k", call.max_k);
  }
  p.left = window(call.window_left), p.right = call.is_causal ? 0 : window(call.window_right);
  p.bottom_right = true;

  const OnDevice on(op, in.query, {&in.key, &in.value, first_query, first_key, used_keys, given});
  TensorPtr out;
  if (given == nullptr) {
    out = empty_result(in.query.sizes(), strides_like(in.query), in.query);
  }
  const Dims lse_sizes = packed ? Dims{in.heads(), in.queries()} : Dims{batch, in.heads(), in.queries()};
  TensorPtr lse = Tensor::empty(lse_sizes, DType::kFloat32, on.device());
  p.lse = lse->data<float>(), p.lse_batch = packed ? 0 : lse->stride(0), p.lse_head = lse->stride(-2);
  p.empty_lse = std::numeric_limits<float>::infinity();
  if (packed) {
    p.first_query = first_query->data<std::int32_t>(), p.first_key = first_key->data<std::int32_t>();
  }
  if (used_keys != nullptr) p.used_keys = used_keys->data<std::int32_t>();
  std::unique_ptr<RandomState> random;
  if (state_slot != nullptr) {
    random = std::make_unique<RandomState>(on);
    p.random_state = random->state->data<std::uint64_t>();
  }
  launch(on, op, in, nullptr, given != nullptr ? *given : *out, p);
  if (out_slot != nullptr) give(out_slot, in_layout(std::move(out), strides_like(in.query)), op);
  give(lse_slot, std::move(lse), op);
  if (state_slot == nullptr) return;
  give(state_slot, std::move(random->state), op);
  give(unused_slot, std::move(random->unused), op);
  give(debug_slot, Tensor::empty(Dims{0}, in.query.dtype(), on.device()), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__flash_attention_forward(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* cum_seq_q,
    AtenTensorHandle* cum_seq_k, std::int64_t max_q, std::int64_t max_k, double dropout_p, std::int32_t is_causal,
    std::int32_t return_debug_mask, double* scale, std::int64_t* window_size_left, std::int64_t* window_size_right,
    AtenTensorHandle* seqused_k, AtenTensorHandle* alibi_slopes, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
    AtenTensorHandle* ret2, AtenTensorHandle* ret3, AtenTensorHandle* ret4) {
  constexpr Op kOp{"_flash_attention_forward", DeviceType::kCUDA};
  return guarded(kOp, [&] {
    check_returns(kOp, {ret0});
    flash({kOp, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal != 0,
           return_debug_mask != 0, scale, window_size_left, window_size_right, seqused_k, alibi_slopes, nullptr},
          nullptr, ret0, ret1, ret2, ret3, ret4);
  });
}

// num_splits is a hint to FlashAttention's own scheduler: how many splits there are does not change what is computed.
UNTORCH_SHIM aoti_torch_cuda__flash_attention_forward_v2(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* cum_seq_q,
    AtenTensorHandle* cum_seq_k, std::int64_t max_q, std::int64_t max_k, double dropout_p, std::int32_t is_causal,
    std::int32_t return_debug_mask, double* scale, std::int64_t* window_size_left, std::int64_t* window_size_right,
    AtenTensorHandle* seqused_k, AtenTensorHandle* alibi_slopes, AtenTensorHandle* block_table,
    std::int64_t* /*num_splits*/, AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
    AtenTensorHandle* ret3, AtenTensorHandle* ret4) {
  constexpr Op kOp{"_flash_attention_forward", DeviceType::kCUDA};
  return guarded(kOp, [&] {
    check_returns(kOp, {ret0});
    flash({kOp, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal != 0,
           return_debug_mask != 0, scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table},
          nullptr, ret0, ret1, ret2, ret3, ret4);
  });
}

UNTORCH_SHIM aoti_torch_cuda__flash_attention_forward_no_dropout_inplace(
    AtenTensorHandle out, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
    AtenTensorHandle* cum_seq_q, AtenTensorHandle* cum_seq_k, std::int64_t max_q, std::int64_t max_k, double dropout_p,
    std::int32_t is_causal, std::int32_t return_debug_mask, double* scale, std::int64_t* window_size_left,
    std::int64_t* window_size_right, AtenTensorHandle* seqused_k, AtenTensorHandle* alibi_slopes,
    AtenTensorHandle* block_table, AtenTensorHandle* ret0) {
  constexpr Op kOp{"_flash_attention_forward_no_dropout_inplace", DeviceType::kCUDA};
  return guarded(kOp, [&] {
    check_returns(kOp, {ret0});
    (void)required(out, kOp, "out");
    flash({kOp, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal != 0,
           return_debug_mask != 0, scale, window_size_left, window_size_right, seqused_k, alibi_slopes, block_table},
          out, nullptr, ret0, nullptr, nullptr, nullptr);
  });
}

UNTORCH_SHIM aoti_torch_cuda__flash_attention_forward_no_dropout_inplace_v2(
    AtenTensorHandle out, AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value,
    AtenTensorHandle* cum_seq_q, AtenTensorHandle* cum_seq_k, std::int64_t max_q, std::int64_t max_k, double dropout_p,
    std::int32_t is_causal, std::int32_t return_debug_mask, double* scale, std::int64_t* window_size_left,
    std::int64_t* window_size_right, AtenTensorHandle* seqused_k, AtenTensorHandle* alibi_slopes,
    AtenTensorHandle* block_table, std::int64_t* /*num_splits*/, AtenTensorHandle* ret0) {
  return aoti_torch_cuda__flash_attention_forward_no_dropout_inplace(
      out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale,
      window_size_left, window_size_right, seqused_k, alibi_slopes, block_table, ret0);
}

UNTORCH_SHIM aoti_torch_cuda__efficient_attention_forward(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle* bias,
    AtenTensorHandle* cu_seqlens_q, AtenTensorHandle* cu_seqlens_k, std::int64_t* max_seqlen_q,
    std::int64_t* max_seqlen_k, double dropout_p, std::int64_t custom_mask_type, std::int32_t compute_log_sumexp,
    double* scale, AtenTensorHandle* seqlen_k, std::int64_t* window_size, AtenTensorHandle* ret0,
    AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3, std::int64_t* ret4, std::int64_t* ret5) {
  constexpr Op kOp{"_efficient_attention_forward", DeviceType::kCUDA};
  enum : std::int64_t { kNoMask = 0, kCausalTopLeft = 1, kCausalBottomRight = 2 };
  return guarded(kOp, [&] {
    const Operands in =
        operands(kOp, query, key, value, kRowsFirst, {.widest = DType::kFloat32, .groups = false, .value_width = true});
    const Tensor* add = kOp.optional_input(bias, "bias");
    const Tensor* first_query = kOp.optional_input(cu_seqlens_q, "cu_seqlens_q");
    const Tensor* first_key = kOp.optional_input(cu_seqlens_k, "cu_seqlens_k");
    const Tensor* used_keys = kOp.optional_input(seqlen_k, "seqlen_k");
    check_inference(kOp, dropout_p, false);
    check_returns(kOp, {ret0});
    check(custom_mask_type >= kNoMask && custom_mask_type <= kCausalBottomRight, kOp,
          ": argument 'custom_mask_type' must be 0 (none), 1 (causal, top left) or 2 (causal, bottom right), got ",
          custom_mask_type);
    refuse(kOp, "window_size", window_size != nullptr && *window_size > 0);
    check((first_query == nullptr) == (first_key == nullptr), kOp,
          ": 'cu_seqlens_q' and 'cu_seqlens_k' must be both given or both absent");
    const bool packed = first_query != nullptr;
    std::int64_t batch = in.batch();
    if (packed) {
      check(batch == 1, kOp, ": with 'cu_seqlens_q' argument 'query' must have a batch of 1, got shape ",
            to_string(in.query.sizes()));
      refuse(kOp, "bias", add != nullptr);
      check(max_seqlen_q != nullptr, kOp, ": 'cu_seqlens_q' needs 'max_seqlen_q'");
      check(first_query->dim() == 1 && first_query->size(0) >= 1, kOp,
            ": argument 'cu_seqlens_q' must be 1-D with at least one value, got shape ",
            to_string(first_query->sizes()));
      batch = first_query->size(0) - 1;
      check_lengths(kOp, "cu_seqlens_q", first_query, batch + 1);
      check_lengths(kOp, "cu_seqlens_k", first_key, batch + 1);
    }
    check_bias(kOp, add, in);
    check_lengths(kOp, "seqlen_k", used_keys, batch);
    kernels::cuda::Attention p = problem(in, scale);
    if (packed) {
      p.batch = static_cast<int>(batch);
      p.queries = longest(kOp, "max_seqlen_q", *max_seqlen_q);
      if (max_seqlen_k != nullptr) p.keys = longest(kOp, "max_seqlen_k", *max_seqlen_k);
    }
    const OnDevice on(kOp, in.query, {&in.key, &in.value, add, first_query, first_key, used_keys});
    TensorPtr out =
        Tensor::empty(Dims{in.batch(), in.queries(), in.heads(), in.value_width()}, in.query.dtype(), on.device());
    const std::int64_t rows = compute_log_sumexp != 0 ? (p.queries + 31) / 32 * 32 : 0;
    TensorPtr lse = Tensor::empty(Dims{batch, in.heads(), rows}, DType::kFloat32, on.device());
    if (rows > 0) {
      p.lse = lse->data<float>(), p.lse_batch = lse->stride(0), p.lse_head = lse->stride(1);
      p.lse_rows = static_cast<int>(rows);
    }
    if (packed) {
      p.first_query = first_query->data<std::int32_t>(), p.first_key = first_key->data<std::int32_t>();
    }
    if (used_keys != nullptr) p.used_keys = used_keys->data<std::int32_t>();
    if (custom_mask_type != kNoMask) p.right = 0, p.bottom_right = custom_mask_type == kCausalBottomRight;
    launch(on, kOp, in, add, *out, p);
    give(ret0, std::move(out), kOp);
    give_if_asked(ret1, std::move(lse));
    give_if_asked(ret2, Tensor::scalar<std::int64_t>(0, DType::kInt64));
    give_if_asked(ret3, Tensor::scalar<std::int64_t>(0, DType::kInt64));
    if (ret4 != nullptr) *ret4 = p.queries;
    if (ret5 != nullptr) *ret5 = p.keys;
  });
}
