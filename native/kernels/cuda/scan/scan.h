// Running sums, products, log-sum-exps and extrema along rows. Deterministic: the order in which elements are combined
// depends on the shape alone.
#pragma once

#include <cstddef>

#include "base/lanes.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// Operands: 0 the result, 1 the input.
struct ScanJob {
  Lanes<2> lanes;
  void* out = nullptr;
  const void* input = nullptr;
  // Integer sums and products take any integer dtype or bool in and any integer dtype out; otherwise the two agree.
  DType out_dtype = DType::kFloat32, in_dtype = DType::kFloat32;
};

// Operands: 0 the values, 1 their positions (int64), 2 the input.
struct ExtremumJob {
  Lanes<3> lanes;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
  const void* input = nullptr;
  DType dtype = DType::kFloat32;
  bool largest = true;
};

// Bytes of scratch that any of the scans needs: 0 unless there are few, long rows.
std::size_t scan_scratch(std::int64_t rows, std::int64_t n);

int cumsum(const ScanJob& job, void* scratch, Stream stream);
int cumprod(const ScanJob& job, void* scratch, Stream stream);
int logcumsumexp(const ScanJob& job, void* scratch, Stream stream);
// Ties take the later position; NaN wins over everything, the last one seen.
int cumulative_extremum(const ExtremumJob& job, void* scratch, Stream stream);

}  // namespace untorch::kernels::cuda
