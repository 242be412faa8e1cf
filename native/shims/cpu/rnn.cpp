// mkldnn_rnn_layer: one direction of one LSTM layer, time first.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/rnn/rnn.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

constexpr const char* kOp = "mkldnn_rnn_layer";
constexpr std::int64_t kLstm = 2;  // 0 and 1 are the plain RNN, 3 is the GRU

struct Layer {
  std::int64_t steps, batch, inputs, hidden;
  bool reverse;
};

// input [steps, batch, inputs], w_input [4*hidden, inputs], w_hidden [4*hidden, hidden], bias [4*hidden] or null, all
// row-major. output [steps, batch, hidden]; h and c [batch, hidden] hold the first state and then the last.
template <class T>
void lstm(const Layer& layer, const T* input, const T* w_input, const T* w_hidden, const T* bias, T* output, T* h,
          T* c) {
  const std::int64_t gates = 4 * layer.hidden, state = layer.batch * layer.hidden;
  if (state == 0) return;
  const TensorPtr buffer = Tensor::empty(Dims{layer.steps, layer.batch, gates},
                                         std::is_same_v<T, float> ? DType::kFloat32 : DType::kFloat64);
  T* all = buffer->data<T>();
  const std::int64_t rows = layer.steps * layer.batch;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t g = 0; g < gates; ++g) all[r * gates + g] = bias == nullptr ? T(0) : bias[g];
  }
  // The input's share of all steps in one product; the recurrent share step by step.
  if (layer.inputs > 0) {
    kernels::gemm(rows, gates, layer.inputs, T(1), {input, layer.inputs, 1}, {w_input, 1, layer.inputs}, T(1),
                  {all, gates, 1});
  }
  // Several rows against the same matrix at every step: pack it once.
  TensorPtr packed, step;
  if constexpr (std::is_same_v<T, float>) {
    constexpr std::int64_t kPackFrom = 4;
    if (layer.batch >= kPackFrom && layer.steps > 1) {
      packed = Tensor::empty(Dims{kernels::packed_size(gates, layer.hidden)}, DType::kFloat32);
      step = Tensor::empty(Dims{layer.batch, gates}, DType::kFloat32);
      kernels::pack_b(gates, layer.hidden, {w_hidden, 1, layer.hidden}, packed->data<float>());
    }
  }
  const auto cell = UNTORCH_ISA_CALL(lstm_cell<T>);
  const T* previous = h;
  const bool parallel = static_cast<double>(state) * 40 > kernels::kParallelWork;
  for (std::int64_t i = 0; i < layer.steps; ++i) {
    const std::int64_t t = layer.reverse ? layer.steps - 1 - i : i;
    T* now = all + t * layer.batch * gates;
    T* out = output + t * state;
    const T* sums = now;
    if (packed != nullptr) {
      if constexpr (std::is_same_v<T, float>) {
        kernels::gemm_packed(layer.batch, gates, layer.hidden, previous, layer.hidden, packed->data<float>(), nullptr,
                             kernels::Activation::kNone, now, gates, step->data<float>(), gates);
        sums = step->data<float>();
      }
    } else {
      kernels::gemm(layer.batch, gates, layer.hidden, T(1), {previous, layer.hidden, 1}, {w_hidden, 1, layer.hidden},
                    T(1), {now, gates, 1});
    }
    kernels::for_each_item(layer.batch, parallel, [&](std::int64_t n) {
      cell(1, layer.hidden, sums + n * gates, c + n * layer.hidden, out + n * layer.hidden, layer.hidden);
    });
    previous = out;
  }
  if (previous != h) std::copy_n(previous, state, h);
}

void check_shape(const Tensor& tensor, const char* argument, DimSpan expected) {
  check(to_string(tensor.sizes()) == to_string(expected), kOp, ": argument '", argument, "' must have shape ",
        to_string(expected), ", got ", to_string(tensor.sizes()));
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
  return guarded(kOp, [&] {
    if (mode != kLstm) {
      throw_error(ErrorKind::kUnsupported, kOp, ": argument 'mode' must be 2 (LSTM), got ", mode,
                  "; PyTorch's operator serves no other either");
    }
    if (!ints(batch_sizes, batch_sizes_len).empty()) {
      throw_error(ErrorKind::kUnsupported, kOp,
                  ": packed sequences (batch_sizes) are not supported; pad the sequences");
    }
    const Tensor &x = cpu_input(input, kOp, "input"), &w0 = cpu_input(weight0, kOp, "weight0"),
                 &w1 = cpu_input(weight1, kOp, "weight1"), &hx = cpu_input(hx_, kOp, "hx_"),
                 &cx = cpu_input(cx_, kOp, "cx_");
    check(x.dim() == 3, kOp, ": argument 'input' must be [time, batch, features], got shape ", to_string(x.sizes()));
    check(hidden_size > 0, kOp, ": argument 'hidden_size' must be positive, got ", hidden_size);
    const Layer layer{x.size(0), x.size(1), x.size(2), hidden_size, reverse != 0};
    check_shape(w0, "weight0", Dims{4 * hidden_size, layer.inputs});
    check_shape(w1, "weight1", Dims{4 * hidden_size, hidden_size});
    for (const auto& [state, name] : {std::pair{&hx, "hx_"}, std::pair{&cx, "cx_"}}) {
      check(state->numel() == layer.batch * hidden_size, kOp, ": argument '", name, "' must hold [", layer.batch, ", ",
            hidden_size, "] values, got shape ", to_string(state->sizes()));
    }
    const DType dtype = x.dtype();
    const DType wide = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    if (!is_floating(dtype)) {
      throw_error(ErrorKind::kUnsupported, kOp, ": dtype ", dtype_name(dtype),
                  " is not supported, expected float16, bfloat16, float32 or float64");
    }
    for (const auto& [tensor, name] :
         {std::pair{&w0, "weight0"}, std::pair{&w1, "weight1"}, std::pair{&hx, "hx_"}, std::pair{&cx, "cx_"}}) {
      check(tensor->dtype() == dtype, kOp, ": argument '", name, "' must be ", dtype_name(dtype), " like input, got ",
            dtype_name(tensor->dtype()));
    }
    TensorPtr bias;
    if (has_biases != 0) {
      const Tensor &b0 = cpu_input(weight2, kOp, "weight2"), &b1 = cpu_input(weight3, kOp, "weight3");
      check_shape(b0, "weight2", Dims{4 * hidden_size});
      check_shape(b1, "weight3", Dims{4 * hidden_size});
      bias = Tensor::empty(Dims{4 * hidden_size}, wide);
      copy_cpu(*bias, b0);
      const TensorPtr other = to_dtype(b1, wide);
      if (wide == DType::kFloat64) {
        for (std::int64_t i = 0; i < 4 * hidden_size; ++i) bias->data<double>()[i] += other->data<double>()[i];
      } else {
        for (std::int64_t i = 0; i < 4 * hidden_size; ++i) bias->data<float>()[i] += other->data<float>()[i];
      }
    }
    const TensorPtr rows = to_dtype(x, wide), wi = to_dtype(w0, wide), wh = to_dtype(w1, wide);
    TensorPtr out = Tensor::empty(Dims{layer.steps, layer.batch, hidden_size}, wide);
    TensorPtr h = Tensor::empty(hx.sizes(), wide), c = Tensor::empty(cx.sizes(), wide);
    copy_cpu(*h, hx);
    copy_cpu(*c, cx);
    const auto run = [&]<class T>() {
      lstm(layer, rows->data<T>(), wi->data<T>(), wh->data<T>(), bias == nullptr ? nullptr : bias->data<T>(),
           out->data<T>(), h->data<T>(), c->data<T>());
    };
    if (wide == DType::kFloat64) {
      run.template operator()<double>();
    } else {
      run.template operator()<float>();
    }
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr && ret3 != nullptr, kOp, ": output pointer is null");
    give(ret0, to_dtype(*out, dtype), kOp);
    give(ret1, to_dtype(*h, dtype), kOp);
    give(ret2, to_dtype(*c, dtype), kOp);
    // The workspace is for the backward pass only.
    give(ret3, Tensor::empty(Dims{0}, DType::kUInt8), kOp);
  });
}
