// The parts of the W4A8 linear layer that are compiled for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/w4a8/w4a8.h"

namespace untorch::kernels {

// Rows of x as the kernels read them, zeros behind x_width.
struct W4A8Rows {
  std::int8_t* values;  // [m][k]
  float* scales;        // [m][k / 32]
  // [m][k / group], in the same memory. int4: of the values, each times its scale. NVFP4: -12 times that of the values.
  float* sums;
  std::int32_t* shifts;
  // AMX's, in the place of all these, or null: bfloat16 [m up to a multiple of 16][w4a8_amx_stride(k)].
  std::uint16_t* bf16;
};

// An odd number of cache lines: a tile's rows start in different sets of L1.
constexpr std::int64_t w4a8_amx_stride(std::int64_t k) noexcept { return k | 32; }

}  // namespace untorch::kernels

// quantize_parts: rows [row, row_end) of x. w4a8_slice: rows [row, row_end) and the columns of the panels [panel,
// panel_end). w4a8_rows: the rows that it takes at once. round_rows and w4a8_amx_slice, of v4 only: rows of x to
// bfloat16; all rows and those columns, by AMX.
UNTORCH_ISA_DECLARE(
    void quantize_parts(const W4A8Linear& p, std::int64_t row, std::int64_t row_end, const W4A8Rows& rows);
    void w4a8_slice(const W4A8Linear& p, bool vnni, const W4A8Rows& rows, std::int64_t row, std::int64_t row_end,
                    std::int64_t panel, std::int64_t panel_end);
    int w4a8_rows(); void round_rows(const W4A8Linear& p, std::int64_t row, std::int64_t row_end, std::uint16_t* to);
    void w4a8_amx_slice(const W4A8Linear& p, const std::uint16_t* x, std::int64_t panel, std::int64_t panel_end);)
