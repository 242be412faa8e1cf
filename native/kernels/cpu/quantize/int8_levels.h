// The serial part of a weight in int8, one for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/quantize/int8.h"

// Rows [row, row_end).
UNTORCH_ISA_DECLARE(void int8_rows(const Int8Quantization& p, std::int64_t row, std::int64_t row_end);)
