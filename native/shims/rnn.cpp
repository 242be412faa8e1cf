// LSTM: one direction of one layer on the CPU (mkldnn_rnn_layer), and the elementwise half of a cell on CUDA
// (_thnn_fused_lstm_cell). PyTorch has each on that device only.
#include "kernels/rnn.h"

#include <utility>

#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_shape(const char* op, const char* argument, const Tensor& tensor, DimSpan expected) {
  check(to_string(tensor.sizes()) == to_string(expected), op, ": argument '", argument, "' must have shape ",
        to_string(expected), ", got ", to_string(tensor.sizes()));
}

void check_dtype_like(const char* op, const char* argument, const Tensor& tensor, const char* like, DType dtype) {
  check(tensor.dtype() == dtype, op, ": argument '", argument, "' must be ", dtype_name(dtype), " like '", like,
        "', got ", dtype_name(tensor.dtype()));
}

}  // namespace

// The flags batch_first, bidirectional, train and num_layers describe the module around the layer and change nothing
// here: the input is time first, there is one direction and one layer, whatever they say.
UNTORCH_SHIM aoti_torch_cpu_mkldnn_rnn_layer(AtenTensorHandle input, AtenTensorHandle weight0, AtenTensorHandle weight1,
                                             AtenTensorHandle weight2, AtenTensorHandle weight3, AtenTensorHandle hx_,
                                             AtenTensorHandle cx_, std::int32_t reverse,
                                             const std::int64_t* batch_sizes, std::int64_t batch_sizes_len,
                                             std::int64_t mode, std::int64_t hidden_size, std::int64_t /*num_layers*/,
                                             std::int32_t has_biases, std::int32_t /*bidirectional*/,
                                             std::int32_t /*batch_first*/, std::int32_t /*train*/,
                                             AtenTensorHandle* ret0, AtenTensorHandle* ret1, AtenTensorHandle* ret2,
                                             AtenTensorHandle* ret3) {
  constexpr const char* op = "mkldnn_rnn_layer";
  constexpr std::int64_t kLstm = 2;  // 0 and 1 are the plain RNN, 3 is the GRU
  return guarded(op, [&] {
    if (mode != kLstm) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'mode' must be 2 (LSTM), got ", mode,
                  "; PyTorch's operator serves no other either");
    }
    if (!ints(batch_sizes, batch_sizes_len).empty()) {
      throw_error(ErrorKind::kUnsupported, op, ": packed sequences (batch_sizes) are not supported; pad the sequences");
    }
    const Tensor &x = cpu_input(input, op, "input"), &w0 = cpu_input(weight0, op, "weight0"),
                 &w1 = cpu_input(weight1, op, "weight1"), &hx = cpu_input(hx_, op, "hx_"),
                 &cx = cpu_input(cx_, op, "cx_");
    check(x.dim() == 3, op, ": argument 'input' must be [time, batch, features], got shape ", to_string(x.sizes()));
    check(hidden_size > 0, op, ": argument 'hidden_size' must be positive, got ", hidden_size);
    const std::int64_t steps = x.size(0), batch = x.size(1), inputs = x.size(2), gates = 4 * hidden_size;
    check_shape(op, "weight0", w0, Dims{gates, inputs});
    check_shape(op, "weight1", w1, Dims{gates, hidden_size});
    for (const auto& [state, name] : {std::pair{&hx, "hx_"}, std::pair{&cx, "cx_"}}) {
      check(state->numel() == batch * hidden_size, op, ": argument '", name, "' must hold [", batch, ", ", hidden_size,
            "] values, got shape ", to_string(state->sizes()));
    }
    const DType dtype = x.dtype();
    const DType wide = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    if (!is_floating(dtype)) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
                  " is not supported, expected float16, bfloat16, float32 or float64");
    }
    for (const auto& [tensor, name] :
         {std::pair{&w0, "weight0"}, std::pair{&w1, "weight1"}, std::pair{&hx, "hx_"}, std::pair{&cx, "cx_"}}) {
      check_dtype_like(op, name, *tensor, "input", dtype);
    }
    const Tensor *b0 = nullptr, *b1 = nullptr;
    if (has_biases != 0) {
      b0 = &cpu_input(weight2, op, "weight2"), b1 = &cpu_input(weight3, op, "weight3");
      check_shape(op, "weight2", *b0, Dims{gates});
      check_shape(op, "weight3", *b1, Dims{gates});
    }
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr && ret3 != nullptr, op, ": output pointer is null");
    const TensorPtr rows = to_dtype(x, wide), wi = to_dtype(w0, wide), wh = to_dtype(w1, wide);
    const TensorPtr bi = b0 == nullptr ? nullptr : to_dtype(*b0, wide),
                    bh = b1 == nullptr ? nullptr : to_dtype(*b1, wide);
    TensorPtr out = Tensor::empty(Dims{steps, batch, hidden_size}, wide);
    TensorPtr h = Tensor::empty(hx.sizes(), wide), c = Tensor::empty(cx.sizes(), wide);
    copy(*h, hx);
    copy(*c, cx);
    kernels::LstmLayer layer{.steps = steps,
                             .batch = batch,
                             .inputs = inputs,
                             .hidden = hidden_size,
                             .reverse = reverse != 0,
                             .dtype = wide,
                             .input = rows->raw(),
                             .w_input = wi->raw(),
                             .w_hidden = wh->raw(),
                             .bias_input = bi == nullptr ? nullptr : bi->raw(),
                             .bias_hidden = bh == nullptr ? nullptr : bh->raw(),
                             .output = out->raw(),
                             .hidden_state = h->raw(),
                             .cell_state = c->raw()};
    const TensorPtr workspace =
        Tensor::empty(Dims{static_cast<std::int64_t>(kernels::cpu::lstm_workspace(layer))}, DType::kUInt8);
    layer.workspace = workspace->raw();
    kernels::cpu::lstm_layer(layer);
    give(ret0, to_dtype(*out, dtype), op);
    give(ret1, to_dtype(*h, dtype), op);
    give(ret2, to_dtype(*c, dtype), op);
    // The workspace is for the backward pass only.
    give(ret3, Tensor::empty(Dims{0}, DType::kUInt8), op);
  });
}

#ifdef UNTORCH_CUDA_KERNELS
// What an LSTM cell does after its two GEMMs.
UNTORCH_SHIM aoti_torch_cuda__thnn_fused_lstm_cell(AtenTensorHandle input_gates, AtenTensorHandle hidden_gates,
                                                   AtenTensorHandle cx, AtenTensorHandle* input_bias,
                                                   AtenTensorHandle* hidden_bias, AtenTensorHandle* ret0,
                                                   AtenTensorHandle* ret1, AtenTensorHandle* ret2) {
  constexpr Op op{"_thnn_fused_lstm_cell", DeviceType::kCUDA};
  return guarded(op, [&] {
    const Tensor& from_input = op.input(input_gates, "input_gates");
    const Tensor& from_hidden = op.input(hidden_gates, "hidden_gates");
    const Tensor& cell = op.input(cx, "cx");
    const Tensor* bias = op.optional_input(input_bias, "input_bias");
    const Tensor* other_bias = op.optional_input(hidden_bias, "hidden_bias");
    if (!is_floating(from_input.dtype())) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": argument 'input_gates' must be float16, bfloat16, float32 or float64, got ",
                  dtype_name(from_input.dtype()));
    }
    check(from_input.dim() == 2 && from_input.size(1) % 4 == 0, op,
          ": argument 'input_gates' must be 2-D (batch, 4 * hidden), got shape ", to_string(from_input.sizes()));
    const std::int64_t batch = from_input.size(0), hidden = from_input.size(1) / 4;
    const auto check_operand = [&](const char* name, const Tensor* tensor, DimSpan expected) {
      if (tensor == nullptr) return;
      check_dtype_like(op, name, *tensor, "input_gates", from_input.dtype());
      check_shape(op, name, *tensor, expected);
    };
    check_operand("hidden_gates", &from_hidden, Dims{batch, 4 * hidden});
    check_operand("cx", &cell, Dims{batch, hidden});
    check_operand("input_bias", bias, Dims{4 * hidden});
    check_operand("hidden_bias", other_bias, Dims{4 * hidden});
    check((bias == nullptr) == (other_bias == nullptr), op,
          ": 'input_bias' and 'hidden_bias' must be both given or both absent");
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr, op, ": output pointer is null");
    const OnDevice on(op, from_input, {&from_hidden, &cell, bias, other_bias});
    TensorPtr new_hidden = Tensor::empty(cell.sizes(), cell.dtype(), on.device());
    TensorPtr new_cell = Tensor::empty(cell.sizes(), cell.dtype(), on.device());
    TensorPtr workspace = Tensor::empty(from_input.sizes(), cell.dtype(), on.device());
    const TensorPtr a = contiguous(from_input), b = contiguous(from_hidden), c = contiguous(cell);
    const TensorPtr first = bias == nullptr ? nullptr : contiguous(*bias);
    const TensorPtr second = other_bias == nullptr ? nullptr : contiguous(*other_bias);
    on.launched(kernels::cuda::lstm_cell({.dtype = cell.dtype(),
                                          .batch = batch,
                                          .hidden = hidden,
                                          .input_gates = a->raw(),
                                          .hidden_gates = b->raw(),
                                          .input_bias = first == nullptr ? nullptr : first->raw(),
                                          .hidden_bias = second == nullptr ? nullptr : second->raw(),
                                          .cell = c->raw(),
                                          .new_hidden = new_hidden->raw(),
                                          .new_cell = new_cell->raw(),
                                          .workspace = workspace->raw()},
                                         on.stream()));
    give(ret0, std::move(new_hidden), op);
    give(ret1, std::move(new_cell), op);
    give(ret2, std::move(workspace), op);
  });
}
#endif
