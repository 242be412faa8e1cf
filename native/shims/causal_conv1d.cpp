// untorch::causal_conv1d: a short causal convolution of each channel, whose last inputs are in a state pool.
#include <cmath>
#include <tuple>
#include <utility>

#include "kernels/linear_attention.h"
#include "shims/state_pool.h"

namespace untorch::shims {

// x [tokens, channels], weight [channels, width], bias [channels] or null; a layer has (width − 1) · channels elements
// of a row of states from `offset` on. Gives [tokens, channels].
UNTORCH_SHIM aoti_torch_cpu_causal_conv1d(AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias,
                                          AtenTensorHandle states, AtenTensorHandle state_slots,
                                          AtenTensorHandle cu_seqlens_q, AtenTensorHandle seqlens_k,
                                          std::int64_t offset, std::int32_t silu, AtenTensorHandle* ret0) {
  constexpr Op op{"causal_conv1d", DeviceType::kCPU};
  return guarded(op, [&] {
    const Tensor &input = op.input(x, "x"), &kernel = op.input(weight, "weight");
    const Tensor* const added = op.optional_input(bias, "bias");
    const DType dtype = input.dtype();
    check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16, op,
          ": argument 'x' must be float32, bfloat16 or float16, got ", dtype_name(dtype));
    check(input.dim() == 2, op, ": argument 'x' must be [tokens, channels], got shape ", to_string(input.sizes()));
    const std::int64_t tokens = input.size(0), channels = input.size(1);
    check(kernel.dim() == 2 && kernel.size(0) == channels && kernel.size(1) > 0, op, ": argument 'weight' must be [",
          channels, ", width], got shape ", to_string(kernel.sizes()));
    check(kernel.dtype() == dtype, op, ": argument 'weight' must be ", dtype_name(dtype), ", got ",
          dtype_name(kernel.dtype()));
    if (added != nullptr) {
      check(added->dtype() == dtype && added->sizes() == Dims{channels}, op, ": argument 'bias' must be ",
            dtype_name(dtype), " ", to_string(Dims{channels}), ", got ", dtype_name(added->dtype()), " ",
            to_string(added->sizes()));
    }
    const StatePoolArguments pool(op, states, state_slots, cu_seqlens_q, seqlens_k, offset,
                                  (kernel.size(1) - 1) * channels, tokens);
    const TensorPtr rows = channels <= 1 || input.stride(1) == 1 ? std::make_unique<Tensor>(input) : contiguous(input);
    const TensorPtr weights = contiguous(kernel), biases = added == nullptr ? nullptr : contiguous(*added);
    TensorPtr out = Tensor::empty(Dims{tokens, channels}, dtype);
    kernels::cpu::causal_conv1d({.dtype = dtype,
                                 .channels = channels,
                                 .width = kernel.size(1),
                                 .silu = silu != 0,
                                 .x = rows->raw(),
                                 .x_token = rows->stride(0),
                                 .weight = weights->raw(),
                                 .bias = biases == nullptr ? nullptr : biases->raw(),
                                 .out = out->raw(),
                                 .pool = pool.pool()});
    give(ret0, std::move(out), op);
  });
}

}  // namespace untorch::shims
