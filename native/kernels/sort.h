// Sorting rows, and selecting by rank: sort, topk, kthvalue, median and mode.
#pragma once

#include <cstddef>

#include "base/lanes.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Operands: 0 the values out, 1 their positions out (int64), 2 the input. Of a sorted row the ranks from `first` on,
// `take` of them, are written; the others are dropped. NaN is the largest value. Equal elements keep their order, also
// descending.
struct SortParams {
  Lanes<3> lanes;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
  const void* input = nullptr;
  DType dtype = DType::kFloat32;  // any real one
  bool descending = false;
  std::int64_t first = 0, take = 0;
};

enum class Select : int {
  kFirst,      // the `rank` first elements of the order, sorted; equal ones by position
  kRank,       // the element of rank `rank` (from 0)
  kMedian,     // the lower median; NaN when the row holds one
  kNanMedian,  // the lower median of what is not NaN; NaN when there is nothing else
};

// Operands as in SortParams; `descending` selects from the large end (kFirst). `indices` may be null for one element a
// row.
struct SelectParams {
  SortParams sort;
  Select what = Select::kFirst;
  std::int64_t rank = 0;
};

namespace cpu {
// Writes whole rows.
void sort(const SortParams& params);
void select(const SelectParams& params);
// The most frequent value of every row, the smallest of several, and the last position where it stands.
void mode(const SortParams& params);
}  // namespace cpu

namespace cuda {
// Rows up to this length are sorted in one CTA.
inline constexpr std::int64_t kCtaSortMax = 4096;
// Positions are 32-bit while they are sorted: the longest row.
inline constexpr std::int64_t kSortMax = 0x7fffffff;
// Most elements a row that kFirst can select (they are sorted in one CTA).
inline constexpr std::int64_t kSelectMax = kCtaSortMax;

// The scratch memory that a sort needs: 0 for short rows.
int sort_scratch(const SortParams& params, std::size_t& bytes);
int sort(const SortParams& params, void* scratch, Stream stream);
int select_scratch(const SelectParams& params, std::size_t& bytes);
int select(const SelectParams& params, void* scratch, Stream stream);
// As the CPU's, of rows that are sorted already: `sorted` (ascending, dense, n a row), `order` the positions that the
// elements had. Operands: 0 the values out, 1 the positions out.
int mode(const Strided<2>& rows, void* values, std::int64_t* indices, const void* sorted, const std::int64_t* order,
         std::int64_t n, DType dtype, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
