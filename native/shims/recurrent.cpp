// untorch's recurrent layer on the CPU: one direction of one layer of an RNN, LSTM or GRU, with packed weights. CUDA
// has recurrent_steps instead.
#include "shims/recurrent.h"

#include <utility>

#include "kernels/cpu/gemm/gemm.h"
#include "kernels/rnn.h"

namespace untorch::shims {

using kernels::RecurrentCell;

// input [steps, batch, inputs], hx and cx [batch, hidden], lengths [batch]; the weights packed, [ceil(gates·hidden/16),
// inputs or hidden, 16], those of the hidden state also bfloat16 in pairs, [ceil(gates·hidden/16), ceil(hidden/2), 16,
// 2]; the biases [gates·hidden]. Gives the outputs [steps, batch, hidden] and the last states; the
// cell state of cells that have none is empty.
UNTORCH_SHIM aoti_torch_cpu_recurrent_layer(AtenTensorHandle input, AtenTensorHandle w_input, AtenTensorHandle w_hidden,
                                            AtenTensorHandle* bias_input, AtenTensorHandle* bias_hidden,
                                            AtenTensorHandle hx, AtenTensorHandle* cx, AtenTensorHandle* lengths,
                                            const char* cell, std::int32_t reverse, AtenTensorHandle* ret0,
                                            AtenTensorHandle* ret1, AtenTensorHandle* ret2) {
  constexpr const char* op = "recurrent_layer";
  return guarded(op, [&] {
    const Tensor &x = cpu_input(input, op, "input"), &h = cpu_input(hx, op, "hx");
    const Tensor &wi = cpu_input(w_input, op, "w_input"), &wh = cpu_input(w_hidden, op, "w_hidden");
    const Tensor *bi = optional_cpu_input(bias_input, op, "bias_input"),
                 *bh = optional_cpu_input(bias_hidden, op, "bias_hidden");
    const Tensor *c = optional_cpu_input(cx, op, "cx"), *ends = optional_cpu_input(lengths, op, "lengths");
    const RecurrentCell kind = cell_of(op, cell);
    const bool lstm = kind == RecurrentCell::kLstm;
    check(x.dim() == 3, op, ": argument 'input' must be [steps, batch, inputs], got shape ", to_string(x.sizes()));
    check(h.dim() == 2, op, ": argument 'hx' must be [batch, hidden], got shape ", to_string(h.sizes()));
    check_cell_state(op, kind, c);
    const std::int64_t steps = x.size(0), batch = x.size(1), inputs = x.size(2), hidden = h.size(1);
    const std::int64_t gates = kernels::gates_of(kind) * hidden;
    const std::int64_t panels = (gates + kernels::kPackWidth - 1) / kernels::kPackWidth;
    constexpr DType kFloat = DType::kFloat32;
    check_argument(op, "input", &x, kFloat, x.sizes());
    check_argument(op, "hx", &h, kFloat, Dims{batch, hidden});
    check_argument(op, "w_input", &wi, kFloat, Dims{panels, inputs, kernels::kPackWidth});
    const bool narrow = wh.dtype() == DType::kBFloat16;
    check(narrow || wh.dtype() == kFloat, op, ": argument 'w_hidden' must be float32 or bfloat16, got ",
          dtype_name(wh.dtype()));
    check_argument(
        op, "w_hidden", &wh, wh.dtype(),
        narrow ? Dims{panels, (hidden + 1) / 2, kernels::kPackWidth, 2} : Dims{panels, hidden, kernels::kPackWidth});
    check_argument(op, "cx", c, kFloat, Dims{batch, hidden});
    check_argument(op, "bias_input", bi, kFloat, Dims{gates});
    check_argument(op, "bias_hidden", bh, kFloat, Dims{gates});
    check_argument(op, "lengths", ends, DType::kInt64, Dims{batch});
    const TensorPtr rows = contiguous(x), from = contiguous(wi), own = contiguous(wh);
    const TensorPtr first = bi == nullptr ? nullptr : contiguous(*bi),
                    second = bh == nullptr ? nullptr : contiguous(*bh);
    const TensorPtr limits = ends == nullptr ? nullptr : contiguous(*ends);
    TensorPtr out = Tensor::empty(Dims{steps, batch, hidden}, kFloat), state = clone_contiguous(h);
    TensorPtr memory = c == nullptr ? Tensor::empty(Dims{0}, kFloat) : clone_contiguous(*c);
    kernels::RecurrentLayer layer{.cell = kind,
                                  .steps = steps,
                                  .batch = batch,
                                  .inputs = inputs,
                                  .hidden = hidden,
                                  .reverse = reverse != 0,
                                  .input = rows->data<float>(),
                                  .w_input = from->data<float>(),
                                  .bias_input = first == nullptr ? nullptr : first->data<float>(),
                                  .bias_hidden = second == nullptr ? nullptr : second->data<float>(),
                                  .w_hidden = own->raw(),
                                  .hidden_is_bfloat16 = narrow,
                                  .lengths = limits == nullptr ? nullptr : limits->data<std::int64_t>(),
                                  .output = out->data<float>(),
                                  .hidden_state = state->data<float>(),
                                  .cell_state = lstm ? memory->data<float>() : nullptr};
    const TensorPtr workspace = Tensor::empty(Dims{kernels::cpu::recurrent_workspace(layer)}, kFloat);
    layer.workspace = workspace->data<float>();
    kernels::cpu::recurrent_layer(layer);
    give(ret0, std::move(out), op);
    give(ret1, std::move(state), op);
    give(ret2, std::move(memory), op);
  });
}

}  // namespace untorch::shims
