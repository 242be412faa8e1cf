// A step of a recurrent layer, chosen by instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/recurrent_cell.h"

namespace untorch::kernels::cpu {

// Hidden units [first, last), multiples of 16, of all rows in one step. Weights [gates · hidden, hidden], packed in
// panels of 16 rows: float32, or pairs of bfloat16 along the columns.
struct RecurrentStep {
  RecurrentCell cell;
  bool bfloat16;
  bool backward;  // the last units first
  std::int64_t step, rows, hidden, first, last;
  const void* w_hidden;
  const float* bias;                  // [gates · hidden], may be null
  const float* from_input;            // [rows, gates · hidden], with the input's bias
  const float* now;                   // [rows, hidden], and so are the others
  float *cell_state, *next, *output;  // the cell state is LSTM's alone
  const std::int64_t* lengths;        // [rows], may be null: rows from their length on keep their state
};

}  // namespace untorch::kernels::cpu

// How many rows recurrent_step takes: their sums stay in registers.
UNTORCH_ISA_DECLARE(std::int64_t recurrent_rows();)
UNTORCH_ISA_DECLARE(void recurrent_step(const cpu::RecurrentStep& step);)
// `count` hidden units of one row: gate g of from_input and from_hidden, which have their biases, lies g · gate_stride
// further. cell (LSTM alone) is updated in place; next and output get the new hidden state.
UNTORCH_ISA_DECLARE(void recurrent_cell(RecurrentCell kind, std::int64_t count, std::int64_t gate_stride,
                                        const float* from_input, const float* from_hidden, const float* hidden,
                                        float* cell, float* next, float* output);)
// A panel of bfloat16 pairs [pairs][16][2] as float32 [2 · pairs][16].
UNTORCH_ISA_DECLARE(void widen_panel(std::int64_t pairs, const void* packed, float* out);)
