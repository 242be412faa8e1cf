// The W8A8 linear layer's serial parts, one set for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/w8a8/int8.h"

namespace untorch::kernels {

// Quantized activations: `groups` words of four along k in a row, and for each row w = scale · (u - zero).
// With vpdpbusd a word is four bytes. Without it is two, of 16-bit pairs: (k, k + 2) and (k + 1, k + 3).
struct Int8Rows {
  std::uint32_t* words;
  std::int64_t stride;  // words from row to row
  float* scale;
  std::int32_t* zero;
};

// Of rows and 0.
struct RowsRange {
  float low = 0.0f, high = 0.0f;
  bool finite = true;
};

}  // namespace untorch::kernels

// row_words: Int8Rows::stride for rows of k. quantize_rows: rows [row, row_end) of x. range_of_rows:
// their range, to be merged with what is there. widen_bias: the bias in float32,
// [ceil(n/16) · 16], zeros where there is none. takes_amx: whether AMX multiplies such a layer, on a CPU that has it;
// it reads rows up to a multiple of 16. gemm_int8_slice: rows [row, row_end) and columns [col, col_end) of the result,
// col a multiple of 16. int8_tile_rows: the rows of a tile.
UNTORCH_ISA_DECLARE(std::int64_t row_words(std::int64_t k, bool vnni);
                    void quantize_rows(const Int8Linear& p, bool vnni, std::int64_t row, std::int64_t row_end,
                                       const Int8Rows& rows);
                    void range_of_rows(const Int8Linear& p, std::int64_t row, std::int64_t row_end, RowsRange& range);
                    void widen_bias(const Int8Linear& p, float* bias); bool takes_amx(const Int8Linear& p);
                    void gemm_int8_slice(const Int8Linear& p, bool vnni, bool amx, const Int8Rows& rows,
                                         const float* bias, std::int64_t row, std::int64_t row_end, std::int64_t col,
                                         std::int64_t col_end);
                    int int8_tile_rows(bool vnni, bool amx);)
