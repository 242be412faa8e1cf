// _thnn_fused_lstm_cell on the GPU: what an LSTM cell does after its two matrix products.
#include "kernels/cuda/rnn/lstm_cell.h"

#include "shims/cuda/shim.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "_thnn_fused_lstm_cell";

void check_shape(const char* name, const Tensor& t, const Tensor& gates, DimSpan expected) {
  check(t.dtype() == gates.dtype(), kOp, ": argument '", name, "' must be ", dtype_name(gates.dtype()),
        " like 'input_gates', got ", dtype_name(t.dtype()));
  check(to_string(t.sizes()) == to_string(expected), kOp, ": argument '", name, "' must have shape ",
        to_string(expected), ", got ", to_string(t.sizes()));
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda__thnn_fused_lstm_cell(AtenTensorHandle input_gates, AtenTensorHandle hidden_gates,
                                                   AtenTensorHandle cx, AtenTensorHandle* input_bias,
                                                   AtenTensorHandle* hidden_bias, AtenTensorHandle* ret0,
                                                   AtenTensorHandle* ret1, AtenTensorHandle* ret2) {
  return guarded(kOp, [&] {
    const Tensor& from_input = cuda_input(input_gates, kOp, "input_gates");
    const Tensor& from_hidden = cuda_input(hidden_gates, kOp, "hidden_gates");
    const Tensor& cell = cuda_input(cx, kOp, "cx");
    const Tensor* bias = optional_cuda_input(input_bias, kOp, "input_bias");
    const Tensor* other_bias = optional_cuda_input(hidden_bias, kOp, "hidden_bias");
    if (!is_floating(from_input.dtype())) {
      throw_error(ErrorKind::kUnsupported, kOp,
                  ": argument 'input_gates' must be float16, bfloat16, float32 or float64, got ",
                  dtype_name(from_input.dtype()));
    }
    check(from_input.dim() == 2 && from_input.size(1) % 4 == 0, kOp,
          ": argument 'input_gates' must be 2-D (batch, 4 * hidden), got shape ", to_string(from_input.sizes()));
    const std::int64_t batch = from_input.size(0), hidden = from_input.size(1) / 4;
    check_shape("hidden_gates", from_hidden, from_input, Dims{batch, 4 * hidden});
    check_shape("cx", cell, from_input, Dims{batch, hidden});
    if (bias != nullptr) check_shape("input_bias", *bias, from_input, Dims{4 * hidden});
    if (other_bias != nullptr) check_shape("hidden_bias", *other_bias, from_input, Dims{4 * hidden});
    check((bias == nullptr) == (other_bias == nullptr), kOp,
          ": 'input_bias' and 'hidden_bias' must be both given or both absent");
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr, kOp, ": output pointer is null");
    const OnDevice on(kOp, from_input, {&from_hidden, &cell, bias, other_bias});
    TensorPtr new_hidden = Tensor::empty(cell.sizes(), cell.dtype(), on.device());
    TensorPtr new_cell = Tensor::empty(cell.sizes(), cell.dtype(), on.device());
    TensorPtr workspace = Tensor::empty(from_input.sizes(), cell.dtype(), on.device());
    const TensorPtr a = contiguous(from_input), b = contiguous(from_hidden), c = contiguous(cell);
    const TensorPtr first = bias == nullptr ? nullptr : contiguous(*bias);
    const TensorPtr second = other_bias == nullptr ? nullptr : contiguous(*other_bias);
    on.launched(kernels::cuda::lstm_cell(cell.dtype(), a->raw(), b->raw(), first == nullptr ? nullptr : first->raw(),
                                         second == nullptr ? nullptr : second->raw(), c->raw(), new_hidden->raw(),
                                         new_cell->raw(), workspace->raw(), batch, hidden, on.stream()));
    give(ret0, std::move(new_hidden), kOp);
    give(ret1, std::move(new_cell), kOp);
    give(ret2, std::move(workspace), kOp);
  });
}
