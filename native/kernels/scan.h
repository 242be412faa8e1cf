// Cumulative sums, products, log-sum-exps and extrema along rows. Deterministic: the order in which elements are
// combined depends on the shape alone.
#pragma once

#include <cstddef>

#include "base/lanes.h"
#include "kernels/launcher.h"

namespace untorch::kernels {

// Operands: 0 the result, 1 the input.
struct ScanParams {
  Lanes<2> lanes;
  void* out = nullptr;
  const void* input = nullptr;
  // The two agree, but CUDA's sums and products of integers take any integer dtype or bool in and any integer dtype
  // out.
  DType out_dtype = DType::kFloat32, in_dtype = DType::kFloat32;
};

// Operands: 0 the values, 1 their positions (int64), 2 the input. Ties take the later position; NaN wins over
// everything, the last one seen.
struct ExtremumParams {
  Lanes<3> lanes;
  void* values = nullptr;
  std::int64_t* indices = nullptr;
  const void* input = nullptr;
  DType dtype = DType::kFloat32;
  bool largest = true;
};

// cumsum and cumprod have every dtype but bool and the eight-bit floats; logcumsumexp has the floating ones.
namespace cpu {
void cumsum(const ScanParams& params);
void cumprod(const ScanParams& params);
void logcumsumexp(const ScanParams& params);
void cumulative_extremum(const ExtremumParams& params);
}  // namespace cpu

namespace cuda {
// Bytes of scratch that any of the scans needs: 0 unless there are few, long rows.
std::size_t scan_scratch(std::int64_t rows, std::int64_t n);

int cumsum(const ScanParams& params, void* scratch, Stream stream);
int cumprod(const ScanParams& params, void* scratch, Stream stream);
int logcumsumexp(const ScanParams& params, void* scratch, Stream stream);
int cumulative_extremum(const ExtremumParams& params, void* scratch, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
