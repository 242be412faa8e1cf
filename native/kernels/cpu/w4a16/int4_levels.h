// The parts of the int4 linear layer that are compiled for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/w4a16/int4.h"

namespace untorch::kernels {

// A tile has 8 columns; a k block is 128 k, 16 words a column.
inline constexpr std::int64_t kInt4Tile = 8, kInt4Block = 128;
// M of the register-blocked kernel.
inline constexpr std::int64_t kInt4Rows = 8;
// k blocks; the last one may be partial.
inline std::int64_t int4_blocks(std::int64_t k) { return (k + kInt4Block - 1) / kInt4Block; }

}  // namespace untorch::kernels

// permute_rows: x's rows [row, row + rows) as [k block][nibble][row][16], the 16 lanes in the order of the weight's
// words; zeros behind x_width. gemm_tiles: the columns of tiles [tile, tile_end) for those rows. dequantize_panels:
// columns [col, col_end), from a multiple of 16 on, as packed panels (gemm.h) of x_width rows, zeros behind n.
UNTORCH_ISA_DECLARE(void permute_rows(const Int4Linear& p, std::int64_t row, std::int64_t rows, float* permuted);
                    void gemm_tiles(const Int4Linear& p, std::int64_t row, std::int64_t rows, const float* permuted,
                                    std::int64_t tile, std::int64_t tile_end);
                    void dequantize_panels(const Int4Linear& p, std::int64_t col, std::int64_t col_end, float* panels);)
