// The parts of the W4A8 linear layer that are compiled for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/w4a8/w4a8.h"

namespace untorch::kernels {

// Quantized rows of x, zeros behind x_width.
struct W4A8Rows {
  std::int8_t* values;  // [m][k], rows `stride` apart: k, but for AMX
  float* scales;        // [m][k / 32]
  // [m][k / group], in the same memory. int4: of the values, each times its scale. NVFP4: -12 times that of the values.
  float* sums;
  std::int32_t* shifts;
  std::int64_t stride;
  bool amx;  // multiplies these rows, of which there is memory up to a multiple of 16
};

}  // namespace untorch::kernels

// quantize_parts: rows [row, row_end) of x. w4a8_slice: rows [row, row_end) and the columns of the panels [panel,
// panel_end). w4a8_rows: the rows that it takes at once. w4a8_amx_slice: all rows and those columns, by AMX; v4 only.
UNTORCH_ISA_DECLARE(void quantize_parts(const W4A8Linear& p, std::int64_t row, std::int64_t row_end,
                                        const W4A8Rows& rows);
                    void w4a8_slice(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t row,
                                    std::int64_t row_end, std::int64_t panel, std::int64_t panel_end);
                    int w4a8_rows(); void w4a8_amx_slice(const W4A8Linear& p, const W4A8Rows& rows, std::int64_t panel,
                                                         std::int64_t panel_end);)
