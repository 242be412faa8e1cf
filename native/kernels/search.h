// Binary search in sorted rows, and histograms over equal bins.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "kernels/launcher.h"

namespace untorch::kernels {

// out[i] = the first position in the value's row of `sorted` (n a row) whose element is not less than values[i], or,
// with right, greater than it; NaN goes to the end. All dense.
struct SearchParams {
  const void* sorted = nullptr;
  std::int64_t n = 0;
  const void* values = nullptr;
  std::int64_t total = 0, per_row = 0;   // values, and those that share a row: all of them when there is one row
  DType dtype = DType::kFloat32;         // any real one
  const std::int64_t* sorter = nullptr;  // may be null: the rows' order, for rows that are not sorted themselves
  bool right = false;
  void* out = nullptr;
  bool out_int32 = false;
};

// Counts of n dense values over `bins` equal bins of [min, max], the last edge included; values outside are not
// counted. min = max: the range is that of the values, widened by one on both sides if they are all equal.
struct HistogramParams {
  const void* values = nullptr;
  std::int64_t n = 0;
  DType dtype = DType::kFloat32;
  std::int64_t bins = 0;
  double min = 0, max = 0;
  void* out = nullptr;
};

// Weighted counts of points with as many coordinates as `bins` has entries, over equal bins of each coordinate.
struct PointHistogramParams {
  const void* points = nullptr;  // dense [rows, bins.size()]
  std::int64_t rows = 0;
  std::span<const std::int64_t> bins;
  const double* range = nullptr;  // low and high of each coordinate; null: those of the points
  const void* weights = nullptr;  // dense, one a point; null: 1
  bool density = false;           // divides by the sum and by the bin's volume
  DType dtype = DType::kFloat32;  // float32, float64
  void* out = nullptr;            // row-major over the bins, zeroed
  void* edges = nullptr;          // may be null: those of the first coordinate
};

namespace cpu {
// An entry of `sorter` that lies outside of [0, n).
std::optional<std::int64_t> outside(std::span<const std::int64_t> sorter, std::int64_t n);
// The sorter's entries were checked.
void search(const SearchParams& params);
// float32 and float64; `out` comes zeroed. Throws when the range of the values is not finite.
void histogram(const HistogramParams& params);
void point_histogram(const char* op, const PointHistogramParams& params);
}  // namespace cpu

namespace cuda {
// A sorter's entries are brought into the row, so that a wrong one gives a wrong position and no stray read.
int search(const SearchParams& params, Stream stream);
// Floating and integer dtypes. A range that is not finite makes every count of a floating result NaN.
std::size_t histogram_scratch(std::int64_t bins);
int histogram(const HistogramParams& params, void* scratch, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
