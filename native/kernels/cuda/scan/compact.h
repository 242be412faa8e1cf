// Ordered compaction: the elements whose flag is not zero, in row-major order. Counting and writing are apart, since
// the caller may have to make room in between.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Operand 0 is a row-major tensor of the shape (it fixes the order and is not touched), 1 the flags, 2 the values.
struct CompactJob {
  Strided<3> space;
  const void* flags = nullptr;
  DType flag_dtype = DType::kBool;
};

// int64 entries of `starts`.
std::int64_t compact_entries(std::int64_t numel);
// Fills `starts`; its last entry is the number of elements.
int compact_count(const CompactJob& job, std::int64_t* starts, Stream stream);
// out[p · row_step + d · dim_step] = coordinate d of element p, for p < limit.
int compact_coordinates(const CompactJob& job, const std::int64_t* starts, int ndim, const std::int64_t* sizes,
                        std::int64_t* out, std::int64_t row_step, std::int64_t dim_step, std::int64_t limit,
                        Stream stream);
// The same for p from the number of elements to limit: every coordinate is `value`.
int compact_fill_rest(const std::int64_t* count, int ndim, std::int64_t* out, std::int64_t row_step,
                      std::int64_t dim_step, std::int64_t limit, std::int64_t value, Stream stream);
// out[p] = the value of element p.
int compact_values(const CompactJob& job, const std::int64_t* starts, void* out, const void* values, int element_bytes,
                   Stream stream);

// out[i] = the row that position i belongs to when row r takes ends[r] - ends[r - 1] positions; i < total.
int expand_rows(const std::int64_t* ends, std::int64_t rows, void* out, bool out_int32, std::int64_t total,
                Stream stream);
// *flag = 1 when one of n values (a step apart) is negative; the caller clears it first.
int find_negative(const void* values, DType dtype, std::int64_t n, std::int64_t step, std::int64_t* flag,
                  Stream stream);

}  // namespace untorch::kernels::cuda
