// The serial part of HQQ, one for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/quantize/hqq.h"

// Rows [row, row_end).
UNTORCH_ISA_DECLARE(void hqq_rows(const Hqq& p, std::int64_t row, std::int64_t row_end);)
