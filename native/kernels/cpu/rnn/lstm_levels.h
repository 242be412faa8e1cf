// The elementwise part of an LSTM step, chosen by instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"

// gates: [n, 4 * hidden] pre-activations in the order input, forget, cell, output. cell [n, hidden] is updated in
// place, hidden_out [n, hidden] (row stride out_stride) gets output * tanh(cell). T is float or double.
UNTORCH_ISA_DECLARE(template <class T> void lstm_cell(std::int64_t n, std::int64_t hidden, const T* gates, T* cell,
                                                      T* hidden_out, std::int64_t out_stride);)
