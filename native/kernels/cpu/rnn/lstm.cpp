// An LSTM layer: one GEMM for the input's share of all steps, then a GEMM and the gates for each step.
#include <algorithm>
#include <type_traits>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/gemm/gemm.h"
#include "kernels/cpu/rnn/lstm_levels.h"
#include "kernels/rnn.h"

namespace untorch::kernels::cpu {
namespace {

// Parts of the workspace, in elements. The weights are packed once where several rows meet the same matrix at every
// step.
struct Parts {
  std::int64_t gates, bias, packed, step;  // lengths

  explicit Parts(const LstmLayer& layer)
      : gates(aligned(layer.steps * layer.batch * 4 * layer.hidden)), bias(aligned(4 * layer.hidden)) {
    constexpr std::int64_t kPackFrom = 4;
    const bool packs = layer.dtype == DType::kFloat32 && layer.batch >= kPackFrom && layer.steps > 1;
    packed = packs ? aligned(packed_size(4 * layer.hidden, layer.hidden)) : 0;
    step = packs ? layer.batch * 4 * layer.hidden : 0;
  }
  std::int64_t total() const { return gates + bias + packed + step; }
  static std::int64_t aligned(std::int64_t count) { return (count + 15) / 16 * 16; }
};

template <class T>
void run(const LstmLayer& layer) {
  const std::int64_t gates = 4 * layer.hidden, state = layer.batch * layer.hidden;
  if (state == 0) return;
  const auto *const w_input = static_cast<const T*>(layer.w_input), *const w_hidden =
                                                                        static_cast<const T*>(layer.w_hidden);
  const auto *const bias0 = static_cast<const T*>(layer.bias_input), *const bias1 =
                                                                         static_cast<const T*>(layer.bias_hidden);
  auto *const output = static_cast<T*>(layer.output), *const h = static_cast<T*>(layer.hidden_state),
              *const c = static_cast<T*>(layer.cell_state);
  const std::int64_t rows = layer.steps * layer.batch;
  const Parts parts(layer);
  T* const all = static_cast<T*>(layer.workspace);
  T* const bias = all + parts.gates;
  for (std::int64_t g = 0; g < gates; ++g) bias[g] = bias0 == nullptr ? T(0) : bias0[g] + bias1[g];
  for (std::int64_t r = 0; r < rows; ++r) std::copy_n(bias, gates, all + r * gates);
  // The input's share of all steps in one GEMM; the recurrent share step by step.
  if (layer.inputs > 0) {
    kernels::gemm(rows, gates, layer.inputs, T(1), {static_cast<const T*>(layer.input), layer.inputs, 1},
                  {w_input, 1, layer.inputs}, T(1), {all, gates, 1});
  }
  T* const packed = bias + parts.bias;
  T* const step = packed + parts.packed;
  if constexpr (std::is_same_v<T, float>) {
    if (parts.packed > 0) pack_b(gates, layer.hidden, {w_hidden, 1, layer.hidden}, packed);
  }
  const auto cell = UNTORCH_ISA_CALL(lstm_cell<T>);
  const T* previous = h;
  const bool parallel = static_cast<double>(state) * 40 > kParallelWork;
  for (std::int64_t i = 0; i < layer.steps; ++i) {
    const std::int64_t t = layer.reverse ? layer.steps - 1 - i : i;
    T* now = all + t * layer.batch * gates;
    T* out = output + t * state;
    const T* sums = now;
    if (parts.packed > 0) {
      if constexpr (std::is_same_v<T, float>) {
        gemm_packed(layer.batch, gates, layer.hidden, previous, layer.hidden, packed, nullptr, {}, now, gates, step,
                    gates);
        sums = step;
      }
    } else {
      kernels::gemm(layer.batch, gates, layer.hidden, T(1), {previous, layer.hidden, 1}, {w_hidden, 1, layer.hidden},
                    T(1), {now, gates, 1});
    }
    for_each_item(layer.batch, parallel, [&](std::int64_t n) {
      cell(1, layer.hidden, sums + n * gates, c + n * layer.hidden, out + n * layer.hidden, layer.hidden);
    });
    previous = out;
  }
  if (previous != h) std::copy_n(previous, state, h);
}

}  // namespace

std::size_t lstm_workspace(const LstmLayer& layer) {
  return static_cast<std::size_t>(Parts(layer).total()) * element_size(layer.dtype);
}

void lstm_layer(const LstmLayer& layer) {
  if (layer.dtype == DType::kFloat64) return run<double>(layer);
  return run<float>(layer);
}

}  // namespace untorch::kernels::cpu
