// Ordered compaction: the elements whose flag is not zero, in row-major order; and its inverse, repetition.
#pragma once

#include <span>
#include <vector>

#include "base/strided.h"
#include "kernels/cuda/common/device_fault.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Operand 0 is a row-major tensor of the shape (it fixes the order and is not touched), 1 the flags, 2 the values.
struct CompactParams {
  Strided<3> space;
  const void* flags = nullptr;
  DType flag_dtype = DType::kBool;
};

namespace cpu {
// Positions of the elements that are not zero in a dense tensor, in row-major order: a column a dimension.
std::vector<std::vector<std::int64_t>> nonzero(const char* op, std::span<const std::int64_t> sizes, DType dtype,
                                               const void* values);
// How many of n flags are set.
std::int64_t count_set(const std::uint8_t* flags, std::int64_t n);
// out takes those of n dense values whose flag is set.
void masked_select(DType dtype, const std::uint8_t* flags, const void* values, std::int64_t n, void* out);
// The r-th set element takes source[r]. Operands: row-major order (of the flags), out.
void masked_scatter(const Strided<2>& space, DType dtype, const std::uint8_t* flags, const void* source, void* out);
// The sum of n counts, a step apart (int32 or int64), and the first negative one with its position; -1: there is none.
struct CountSum {
  std::int64_t total = 0, negative = 0, negative_at = -1;
};
CountSum sum_counts(const void* counts, DType dtype, std::int64_t n, std::int64_t step);
// out (of the counts' dtype) = i, counts[i] times, for every i.
void expand_rows(const void* counts, DType dtype, std::int64_t n, std::int64_t step, void* out);
}  // namespace cpu

// Counting and writing are apart, since the caller may have to make room in between.
namespace cuda {
// int64 entries of `starts`.
std::int64_t compact_entries(std::int64_t numel);
// Fills `starts`; its last entry is the number of elements.
int compact_count(const CompactParams& params, std::int64_t* starts, Stream stream);
// out[p · row_step + d · dim_step] = coordinate d of element p, for p < limit.
int compact_coordinates(const CompactParams& params, const std::int64_t* starts, int ndim, const std::int64_t* sizes,
                        std::int64_t* out, std::int64_t row_step, std::int64_t dim_step, std::int64_t limit,
                        Stream stream);
// The same for p from the number of elements to limit: every coordinate is `value`.
int compact_fill_rest(const std::int64_t* count, int ndim, std::int64_t* out, std::int64_t row_step,
                      std::int64_t dim_step, std::int64_t limit, std::int64_t value, Stream stream);
// out[p] = the value of element p.
int compact_values(const CompactParams& params, const std::int64_t* starts, void* out, const void* values,
                   int element_bytes, Stream stream);

// ranks[i]: how many of the flags 0 … i are set. With a null `scratch` nothing is launched and `scratch_bytes` becomes
// what is needed.
int inclusive_count(void* scratch, std::size_t& scratch_bytes, const std::uint8_t* flags, std::int64_t* ranks,
                    std::int64_t n, Stream stream);
// The row-major coordinates of the set elements of a dense mask: dimension d of the r-th at columns[d * count + r].
// `sizes` outermost first.
struct MaskShape {
  int ndim = 0;
  std::int64_t sizes[kMaxDims] = {};
};
int mask_columns(const std::uint8_t* mask, const std::int64_t* ranks, std::int64_t n, const MaskShape& shape,
                 std::int64_t* columns, std::int64_t count, Stream stream);
// The r-th set element takes source[r]. Operands: out, row-major order (which mask and ranks are in). A set element
// beyond `available` is reported and keeps its value.
int masked_scatter(const Strided<2>& space, void* out, const std::uint8_t* mask, const std::int64_t* ranks,
                   const void* source, std::int64_t available, int element_bytes, FaultWord* word, Stream stream);

// out[i] = the row that position i belongs to when row r takes ends[r] - ends[r - 1] positions; i < total.
int expand_rows(const std::int64_t* ends, std::int64_t rows, void* out, bool out_int32, std::int64_t total,
                Stream stream);
// *flag = 1 when one of n values (a step apart) is negative; the caller clears it first.
int find_negative(const void* values, DType dtype, std::int64_t n, std::int64_t step, std::int64_t* flag,
                  Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
