// Recurrent layers: a direction of one on the CPU, all directions without the input's GEMM on CUDA, and the elementwise
// half of an LSTM cell (CUDA). An LSTM's gates are in the order input, forget, cell, output; a GRU's reset, update,
// new.
#pragma once

#include <cstddef>

#include "kernels/launcher.h"
#include "kernels/recurrent_cell.h"

namespace untorch::kernels {

// Time first, everything row-major and of one dtype, float32 or float64. w_input [4 * hidden, inputs], w_hidden
// [4 * hidden, hidden]; the biases [4 * hidden], or null both.
struct LstmLayer {
  std::int64_t steps = 0, batch = 0, inputs = 0, hidden = 0;
  bool reverse = false;
  DType dtype{};
  const void* input = nullptr;  // [steps, batch, inputs]
  const void *w_input = nullptr, *w_hidden = nullptr, *bias_input = nullptr, *bias_hidden = nullptr;
  void* output = nullptr;                               // [steps, batch, hidden]
  void *hidden_state = nullptr, *cell_state = nullptr;  // [batch, hidden]: the first state, then the last
  void* workspace = nullptr;                            // lstm_workspace() bytes, 64-byte aligned
};

// Time first, everything row-major float32. The weights [gates * hidden, inputs] and [gates * hidden, hidden] are
// packed as for gemm_packed, those of the hidden state also as bfloat16 in pairs; the biases [gates * hidden] may be
// null, each. Row n takes part in the steps below lengths[n] (all without lengths); in the others its state stays and
// its output is 0.
struct RecurrentLayer {
  RecurrentCell cell{};
  std::int64_t steps = 0, batch = 0, inputs = 0, hidden = 0;
  bool reverse = false;
  const float* input = nullptr;  // [steps, batch, inputs]
  const float *w_input = nullptr, *bias_input = nullptr, *bias_hidden = nullptr;
  const void* w_hidden = nullptr;
  bool hidden_is_bfloat16 = false;
  const std::int64_t* lengths = nullptr;                 // [batch]
  float* output = nullptr;                               // [steps, batch, hidden]
  float *hidden_state = nullptr, *cell_state = nullptr;  // [batch, hidden]: the first state, then the last; LSTM's cell
  float* workspace = nullptr;                            // recurrent_workspace() elements
};

// The steps of a layer, whose input's share of the gates is computed. Everything is row-major; direction 0 takes the
// steps forwards, direction 1 backwards. Row n takes part in the steps below lengths[n] (all without lengths); in the
// others its state stays and its output is 0. float16, bfloat16 or float32; computed in float32.
struct RecurrentSteps {
  RecurrentCell cell{};
  DType dtype{};  // of all but `lengths`
  std::int64_t steps = 0, batch = 0, hidden = 0;
  int directions = 1;                     // or 2
  const void* input_gates = nullptr;      // [steps, batch, directions * gates * hidden]
  const void* w_hidden = nullptr;         // [directions, gates * hidden, hidden]
  const void* bias_hidden = nullptr;      // [directions, gates * hidden], or null
  const std::int64_t* lengths = nullptr;  // [batch], or null
  void* output = nullptr;                 // [steps, batch, directions * hidden]

  constexpr std::int64_t states() const noexcept { return directions * batch * hidden; }
};

// The states of a RecurrentSteps, [directions, batch, hidden]; the cell's are an LSTM's, else null.
struct RecurrentStates {
  const void *first_hidden = nullptr, *first_cell = nullptr;
  void *last_hidden = nullptr, *last_cell = nullptr;
};

// How the persistent kernel divides a layer: each CTA has some hidden units of one direction for some sequences, all of
// either. No units: it does not serve the layer.
struct RecurrentPlan {
  int units = 0, sequences = 0, ctas = 0, shared_bytes = 0;  // of a CTA; CTAs of a direction
};

// The elementwise half of step `step`, the n-th of each direction.
struct RecurrentUpdate {
  std::int64_t step = 0;
  const float* hidden_gates = nullptr;             // [directions, batch, gates * hidden], without the bias
  float *hidden_state = nullptr, *cell = nullptr;  // [directions, batch, hidden], changed in place; an LSTM's cell
  void* operand = nullptr;                         // the hidden state once more in the layer's dtype, or null
};

// Gates row-major [batch, 4 * hidden]; the biases [4 * hidden] or null; the states [batch, hidden]. float16, bfloat16,
// float32 or float64.
struct LstmCell {
  DType dtype{};
  std::int64_t batch = 0, hidden = 0;
  const void *input_gates = nullptr, *hidden_gates = nullptr, *input_bias = nullptr, *hidden_bias = nullptr;
  const void* cell = nullptr;
  void *new_hidden = nullptr, *new_cell = nullptr;
  void* workspace = nullptr;  // [batch, 4 * hidden] takes the activated gates
};

namespace cpu {
std::size_t lstm_workspace(const LstmLayer& layer);
void lstm_layer(const LstmLayer& layer);
std::int64_t recurrent_workspace(const RecurrentLayer& layer);
void recurrent_layer(const RecurrentLayer& layer);
}  // namespace cpu
namespace cuda {
int lstm_cell(const LstmCell& p, Stream stream);
// All steps by one kernel: a cooperative launch of plan.ctas * directions CTAs. `exchange`: recurrent_exchange_bytes().
RecurrentPlan plan_recurrent_steps(const RecurrentSteps& p, int num_sms, int max_shared_bytes);
inline std::size_t recurrent_exchange_bytes(const RecurrentSteps& p) {
  return static_cast<std::size_t>(p.states()) * 2 * sizeof(std::uint64_t);
}
int recurrent_steps(const RecurrentSteps& p, const RecurrentStates& states, const RecurrentPlan& plan, void* exchange,
                    Stream stream);
int recurrent_update(const RecurrentSteps& p, const RecurrentUpdate& update, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
