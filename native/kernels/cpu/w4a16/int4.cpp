// Int4 W4A16 linear layer on the CPU: dequantize in registers at small M, panels and the packed GEMM at large M.
#include "kernels/cpu/w4a16/int4.h"

#include <algorithm>
#include <memory>

#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_threads.h"
#include "kernels/cpu/w4a16/int4_levels.h"

namespace untorch::kernels {
namespace {

// The largest M for which weights are dequantized in registers, again for every 8 rows; above, once to panels.
constexpr std::int64_t kSmallM = 16;
// Floats of the panels that a thread dequantizes before their GEMM: they stay in L2.
constexpr std::int64_t kPanelFloats = 1 << 17;

using Floats = std::unique_ptr<float[]>;
Floats floats(std::int64_t count) { return Floats(new float[static_cast<std::size_t>(count)]); }

void small_m(const Int4Linear& p) {
  const std::int64_t row_floats = int4_blocks(p.k) * kInt4Block;
  const Floats permuted = floats(p.m * row_floats);
  for (std::int64_t row = 0; row < p.m; row += kInt4Rows) {
    UNTORCH_ISA_CALL(permute_rows)(p, row, std::min(kInt4Rows, p.m - row), permuted.get() + row * row_floats);
  }
  Grid grid = choose_grid(p.m, p.n, p.k, 1, kInt4Tile);
  grid = {1, grid.rows * grid.cols};
  on_grid(grid, p.m, p.n, 1, kInt4Tile, [&](int, std::int64_t, std::int64_t, std::int64_t col, std::int64_t col_end) {
    for (std::int64_t tile = col / kInt4Tile; tile < col_end / kInt4Tile; ++tile) {
      // A tile stays in the cache for all rows.
      for (std::int64_t row = 0; row < p.m; row += kInt4Rows) {
        UNTORCH_ISA_CALL(gemm_tiles)
        (p, row, std::min(kInt4Rows, p.m - row), permuted.get() + row * row_floats, tile, tile + 1);
      }
    }
  });
}

void large_m(const Int4Linear& p) {
  const Grid grid = choose_grid(p.m, p.n, p.k, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth);
  const std::int64_t step = std::max<std::int64_t>(kPanelFloats / p.x_width / kPackWidth, 4) * kPackWidth;
  const std::int64_t most = (p.n + kPackWidth - 1) / kPackWidth * kPackWidth;
  const std::int64_t each = std::min(step, most) * p.x_width;
  const Floats panels = floats(each * grid.rows * grid.cols);
  on_grid(grid, p.m, p.n, UNTORCH_ISA_CALL(tile_rows)(), kPackWidth,
          [&](int part, std::int64_t row, std::int64_t row_end, std::int64_t col, std::int64_t col_end) {
            float* const own = panels.get() + part * each;
            for (std::int64_t j = col; j < col_end; j += step) {
              const std::int64_t width = std::min(step, col_end - j);
              UNTORCH_ISA_CALL(dequantize_panels)(p, j, j + width, own);
              UNTORCH_ISA_CALL(packed_slice)
              (row_end - row, width, p.x_width, p.m, p.x + row * p.x_stride, p.x_stride, own,
               p.bias == nullptr ? nullptr : p.bias + j, {}, nullptr, 0, p.out + row * p.n + j, p.n);
            }
          });
}

}  // namespace

void int4_linear(const Int4Linear& p) {
  if (p.m <= 0 || p.n <= 0) return;
  if (p.m <= kSmallM || p.x_width == 0) {
    small_m(p);
  } else {
    large_m(p);
  }
}

}  // namespace untorch::kernels
