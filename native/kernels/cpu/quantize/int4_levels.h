// The serial part of a weight in int4, one for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/quantize/int4.h"

// Tiles [tile, tile_end) of kInt4Rows rows.
UNTORCH_ISA_DECLARE(void int4_tiles(const Int4Quantization& p, std::int64_t tile, std::int64_t tile_end);)
