// The thread grid of a GEMM [m, n]: about equal rectangles.
#pragma once

#include <omp.h>

#include <cstdint>

namespace untorch::kernels {

struct Grid {
  int rows = 1, cols = 1;
};

inline std::int64_t units(std::int64_t size, std::int64_t unit) { return (size + unit - 1) / unit; }

// As many parts as threads where the work is worth it (2·m·n·k operations), cut so that every part reads the least of A
// and B. Cuts fall on multiples of row_unit and col_unit.
inline Grid choose_grid(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t row_unit, std::int64_t col_unit) {
  constexpr double kOperationsPerThread = 5e5;
  const double operations = 2.0 * static_cast<double>(m) * static_cast<double>(n) * static_cast<double>(k);
  if (operations < 2 * kOperationsPerThread || omp_in_parallel()) return {};
  int threads = omp_get_max_threads();
  if (operations < kOperationsPerThread * threads) threads = static_cast<int>(operations / kOperationsPerThread);
  Grid best;
  double best_cost = -1;
  for (int rows = 1; rows <= threads; ++rows) {
    const int cols = threads / rows;
    // The largest part decides: its operations, and what it reads, which costs about 16 multiply-adds an element of B
    // (packing) and half of that an element of A.
    const double part_m = static_cast<double>(units(units(m, row_unit), rows) * row_unit);
    const double part_n = static_cast<double>(units(units(n, col_unit), cols) * col_unit);
    const double cost = part_m * part_n + 16.0 * part_n + 8.0 * part_m;
    if (best_cost < 0 || cost < best_cost) best_cost = cost, best = {rows, cols};
  }
  return best;
}

// Calls body(part, row0, row1, col0, col1) once for each part of the grid, in parallel. body must not throw.
template <class Body>
void on_grid(Grid grid, std::int64_t m, std::int64_t n, std::int64_t row_unit, std::int64_t col_unit, Body&& body) {
  const int parts = grid.rows * grid.cols;
  if (parts <= 1) {
    body(0, std::int64_t{0}, m, std::int64_t{0}, n);
    return;
  }
  const std::int64_t row_units = units(m, row_unit), col_units = units(n, col_unit);
  const auto cut = [](std::int64_t count, int index, int pieces, std::int64_t unit, std::int64_t limit) {
    const std::int64_t at = count * index / pieces * unit;
    return at < limit ? at : limit;
  };
#pragma omp parallel for schedule(static, 1) num_threads(parts)
  for (int part = 0; part < parts; ++part) {
    const int r = part / grid.cols, s = part % grid.cols;
    const std::int64_t i0 = cut(row_units, r, grid.rows, row_unit, m),
                       i1 = cut(row_units, r + 1, grid.rows, row_unit, m);
    const std::int64_t j0 = cut(col_units, s, grid.cols, col_unit, n),
                       j1 = cut(col_units, s + 1, grid.cols, col_unit, n);
    if (i0 < i1 && j0 < j1) body(part, i0, i1, j0, j1);
  }
}

}  // namespace untorch::kernels
