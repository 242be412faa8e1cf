// untorch::gated_delta_rule: linear attention whose decaying states are in a pool.
#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/linear_attention.h"
#include "shims/state_pool.h"

namespace untorch::shims {
namespace {

// [tokens, heads, width] whose last dimension is dense; a copy where it is not.
TensorPtr dense_rows(const Tensor& x) {
  return x.size(2) <= 1 || x.stride(2) == 1 ? std::make_unique<Tensor>(x) : clone_contiguous(x);
}

void check_argument(const Op& op, const char* name, const Tensor& tensor, DType dtype, const Dims& shape) {
  check(tensor.dtype() == dtype, op, ": argument '", name, "' must be ", dtype_name(dtype), ", got ",
        dtype_name(tensor.dtype()));
  check(tensor.sizes() == shape, op, ": argument '", name, "' must have shape ", to_string(shape), ", got ",
        to_string(tensor.sizes()));
}

}  // namespace

// q and k [tokens, heads_k, width], v [tokens, heads, width_v]; g float32 [tokens, heads] or [tokens, heads, width];
// beta float32 [tokens, heads] or null; a layer has heads · width · width_v elements of a row of states from `offset`
// on. Gives [tokens, heads, width_v].
UNTORCH_SHIM aoti_torch_cpu_gated_delta_rule(AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v,
                                             AtenTensorHandle g, AtenTensorHandle* beta, AtenTensorHandle states,
                                             AtenTensorHandle state_slots, AtenTensorHandle cu_seqlens_q,
                                             AtenTensorHandle seqlens_k, std::int64_t offset, std::int32_t l2norm,
                                             double scale, AtenTensorHandle* ret0) {
  constexpr Op op{"gated_delta_rule", DeviceType::kCPU};
  return guarded(op, [&] {
    const Tensor &query = op.input(q, "q"), &key = op.input(k, "k"), &value = op.input(v, "v"),
                 &decay = op.input(g, "g");
    const Tensor* const rate = op.optional_input(beta, "beta");
    const DType dtype = value.dtype();
    check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, op,
          ": argument 'v' must be float32, bfloat16 or float16, got ", dtype_name(dtype));
    check(value.dim() == 3, op, ": argument 'v' must be [tokens, heads, width_v], got shape ",
          to_string(value.sizes()));
    check(query.dim() == 3, op, ": argument 'q' must be [tokens, heads_k, width], got shape ",
          to_string(query.sizes()));
    const std::int64_t tokens = value.size(0), heads = value.size(1), width_v = value.size(2);
    const std::int64_t heads_k = query.size(1), width = query.size(2);
    check(heads_k > 0 && heads % heads_k == 0, op, ": ", heads, " heads do not divide into ", heads_k, " key heads");
    check_argument(op, "q", query, dtype, Dims{tokens, heads_k, width});
    check_argument(op, "k", key, dtype, Dims{tokens, heads_k, width});
    check_argument(op, "g", decay, DType::kFloat32,
                   decay.dim() == 3 ? Dims{tokens, heads, width} : Dims{tokens, heads});
    if (rate != nullptr) check_argument(op, "beta", *rate, DType::kFloat32, Dims{tokens, heads});
    const StatePoolArguments pool(op, states, state_slots, cu_seqlens_q, seqlens_k, offset, heads * width * width_v,
                                  tokens);
    const TensorPtr queries = dense_rows(query), keys = dense_rows(key), values = dense_rows(value);
    const TensorPtr decays = contiguous(decay), rates = rate == nullptr ? nullptr : contiguous(*rate);
    TensorPtr out = Tensor::empty(Dims{tokens, heads, width_v}, dtype);
    kernels::cpu::gated_delta_rule({.dtype = dtype,
                                    .heads = heads,
                                    .heads_k = heads_k,
                                    .width = width,
                                    .width_v = width_v,
                                    .l2norm = l2norm != 0,
                                    .scale = static_cast<float>(scale),
                                    .q = queries->raw(),
                                    .k = keys->raw(),
                                    .q_token = queries->stride(0),
                                    .q_head = queries->stride(1),
                                    .k_token = keys->stride(0),
                                    .k_head = keys->stride(1),
                                    .v = values->raw(),
                                    .v_token = values->stride(0),
                                    .v_head = values->stride(1),
                                    .g = decays->data<float>(),
                                    .g_width = decay.dim() == 3 ? width : 1,
                                    .beta = rates == nullptr ? nullptr : rates->data<float>(),
                                    .out = out->raw(),
                                    .pool = pool.pool()});
    give(ret0, std::move(out), op);
  });
}

}  // namespace untorch::shims
