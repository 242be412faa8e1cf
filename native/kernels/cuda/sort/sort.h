// Sorting rows, and keeping some ranks of the sorted rows. Stable: equal elements keep their order, also descending.
#pragma once

#include <cstddef>

#include "base/lanes.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Operands: 0 the values out, 1 their positions out (int64), 2 the input. Of a sorted row the ranks from `first` on,
// `take` of them, are written; the others are dropped.
struct SortJob {
  Lanes<3> lanes;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
  const void* input = nullptr;
  DType dtype = DType::kFloat32;
  bool descending = false;
  std::int64_t first = 0, take = 0;
};

// Rows up to this length are sorted in one block.
inline constexpr std::int64_t kBlockSortMax = 4096;
// Positions are 32-bit while they are sorted: the longest row.
inline constexpr std::int64_t kSortMax = 0x7fffffff;

// The scratch memory that the job needs: 0 for short rows.
int sort_scratch(const SortJob& job, std::size_t& bytes);
int sort(const SortJob& job, void* scratch, Stream stream);

// The most frequent value of every row of `sorted` (ascending, dense, n a row), the smallest of several, and the last
// position where it stands. Operands: 0 the values out, 1 the positions out.
int mode(const Strided<2>& rows, void* values, std::int64_t* indices, const void* sorted, const std::int64_t* order,
         std::int64_t n, DType dtype, Stream stream);

}  // namespace untorch::kernels::cuda
