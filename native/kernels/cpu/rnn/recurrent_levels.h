// The elementwise part of a step of a recurrent layer, chosen by instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/recurrent_cell.h"

// `count` hidden units of one row: gate g of from_input and from_hidden, which have their biases, lies g · gate_stride
// further. cell (LSTM alone) is updated in place; next and output get the new hidden state.
UNTORCH_ISA_DECLARE(void recurrent_cell(RecurrentCell kind, std::int64_t count, std::int64_t gate_stride,
                                        const float* from_input, const float* from_hidden, const float* hidden,
                                        float* cell, float* next, float* output);)
