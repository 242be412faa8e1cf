// Distinct values of a sorted row, and counts of small integers.
#pragma once

#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// n values in which equal ones are neighbours, dense, of any real dtype. NaN differs from itself.
struct Groups {
  const void* values = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t n = 0;
  const std::int64_t* order = nullptr;  // where each value was before it was sorted; null: where it is
};
// flags[i] = 1 where a group of equal values begins.
int mark_groups(const Groups& groups, std::uint8_t* flags, Stream stream);
// With ranks[i], the number of groups that begin up to i: distinct[g] = the value of group g; inverse[order[i]] = its
// group; starts[g] = where it begins. The last two may be null.
int write_groups(const Groups& groups, const std::uint8_t* flags, const std::int64_t* ranks, void* distinct,
                 std::int64_t* inverse, std::int64_t* starts, Stream stream);
// counts[g] = starts[g + 1] - starts[g], the last one up to n. `counts` is other memory.
int count_groups(const std::int64_t* starts, std::int64_t* counts, std::int64_t groups, std::int64_t n, Stream stream);

// range[0] = the largest of n integers (a step apart), range[1] = the smallest; the caller sets both to the first.
int integer_range(const void* values, DType dtype, std::int64_t n, std::int64_t step, std::int64_t* range,
                  Stream stream);
// out[value] += 1, or += the value's weight, for n values from 0 to bins - 1. `out` is zero before: int64 without
// weights, else of their dtype, float32 or float64. Weights are added in no fixed order.
struct Bincount {
  const void* values = nullptr;
  DType dtype = DType::kInt64;
  std::int64_t n = 0, step = 1;
  const void* weights = nullptr;
  DType weight_dtype = DType::kFloat32;
  std::int64_t weight_step = 1;
  void* out = nullptr;
  std::int64_t bins = 0;
};
int bincount(const Bincount& p, Stream stream);

}  // namespace untorch::kernels::cuda
