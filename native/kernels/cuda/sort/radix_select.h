// Selection by rank in long rows: the k first, or the element of one rank, without sorting the row.
#pragma once

#include <cstddef>

#include "kernels/cuda/sort/sort.h"

namespace untorch::kernels::cuda {

enum class Select : int {
  kFirst,      // the `rank` first elements of the order, sorted; equal ones by position
  kRank,       // the element of rank `rank` (from 0)
  kMedian,     // the lower median; NaN when the row holds one
  kNanMedian,  // the lower median of what is not NaN; NaN when there is nothing else
};

// Operands as in SortJob; `descending` selects from the large end. `indices` may be null for one element a row.
struct SelectJob {
  SortJob sort;
  Select what = Select::kFirst;
  std::int64_t rank = 0;
};

// Most elements a row that kFirst can select (they are sorted in one block).
inline constexpr std::int64_t kSelectMax = kBlockSortMax;

int select_scratch(const SelectJob& job, std::size_t& bytes);
int select(const SelectJob& job, void* scratch, Stream stream);

}  // namespace untorch::kernels::cuda
