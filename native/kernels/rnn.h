// One direction of one recurrent layer (CPU), and the elementwise half of an LSTM cell (CUDA). An LSTM's gates are in
// the order input, forget, cell, output; a GRU's reset, update, new.
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
}

}  // namespace untorch::kernels
