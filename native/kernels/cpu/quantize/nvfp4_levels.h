// The serial part of a weight in NVFP4, one for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/quantize/nvfp4.h"

// Rows [row, row_end).
UNTORCH_ISA_DECLARE(void nvfp4_rows(const Nvfp4Quantization& p, std::int64_t row, std::int64_t row_end);)
