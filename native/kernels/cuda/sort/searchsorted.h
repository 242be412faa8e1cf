// Binary search in sorted rows, and histograms over equal bins.
#pragma once

#include <cstddef>

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// out[i] = the first position in the value's row of `sorted` (n a row) whose element is not less than values[i], or,
// with right, greater than it; NaN goes to the end. per_row: values that share a row; all of them when there is one
// row. All dense. `sorter` (may be null): the rows' order, for rows that are not sorted themselves; its entries are
// brought into the row, so that a wrong one gives a wrong position and no stray read.
int search(const void* sorted, std::int64_t n, const void* values, std::int64_t total, std::int64_t per_row,
           DType dtype, const std::int64_t* sorter, bool right, void* out, bool out_int32, Stream stream);

// Counts of n dense values over `bins` equal bins of [min, max], the last edge included; values outside are not
// counted. min = max: the range is that of the values, widened by one on both sides if they are all equal. A range
// that is not finite makes every count of a floating result NaN.
std::size_t histogram_scratch(std::int64_t bins);
int histogram(const void* values, std::int64_t n, DType dtype, std::int64_t bins, double min, double max, void* out,
              void* scratch, Stream stream);

}  // namespace untorch::kernels::cuda
