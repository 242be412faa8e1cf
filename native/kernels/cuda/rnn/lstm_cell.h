// The elementwise half of an LSTM cell, after its two matrix products.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Gates in the order input, forget, cell, output: row-major [batch, 4 * hidden]; the biases [4 * hidden] or null;
// cell, new_hidden and new_cell [batch, hidden]; workspace [batch, 4 * hidden] takes the activated gates.
int lstm_cell(DType dtype, const void* input_gates, const void* hidden_gates, const void* input_bias,
              const void* hidden_bias, const void* cell, void* new_hidden, void* new_cell, void* workspace,
              std::int64_t batch, std::int64_t hidden, Stream stream);

}  // namespace untorch::kernels::cuda
