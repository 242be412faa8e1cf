// The parts of the int4 linear layer that are compiled for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/w4a16/int4.h"

namespace untorch::kernels {

// A tile has 8 columns; a block is 128 of the weight's k, in a word of 16 lanes a column.
inline constexpr std::int64_t kInt4Tile = 8, kInt4Block = 128;
// Rows that pass over a block of weights together.
inline constexpr std::int64_t kInt4Rows = 8;
// A float for every row and k of whole blocks.
inline std::int64_t int4_blocks(std::int64_t k) { return (k + kInt4Block - 1) / kInt4Block; }

}  // namespace untorch::kernels

// arrange_rows: x's rows [row, row + rows) as [block][nibble][row][16], the 16 lanes as the weight's words have them;
// zeros behind x_width. multiply_tiles: the columns of tiles [tile, tile_end) for those rows. unpack_panels: columns
// [col, col_end), from a multiple of 16 on, as packed panels (gemm.h) of x_width rows, zeros behind n.
UNTORCH_ISA_DECLARE(void arrange_rows(const Int4Linear& p, std::int64_t row, std::int64_t rows, float* arranged);
                    void multiply_tiles(const Int4Linear& p, std::int64_t row, std::int64_t rows, const float* arranged,
                                        std::int64_t tile, std::int64_t tile_end);
                    void unpack_panels(const Int4Linear& p, std::int64_t col, std::int64_t col_end, float* panels);)
