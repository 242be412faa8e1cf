// The GEMM's serial drivers: blocks that fit the caches, packing where it pays, tiles from
// gemm_micro.h.
//
//   for columns in blocks of nc            B block [kc, nc] in L2
//     for k in blocks of kc
//       for rows in blocks of mc           A block [mc, kc] in L2
//         for tiles of NV panels           B tile [kc, NV·16] in L1
//           for tiles of MR rows
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/gemm/gemm_dot.h"
#include "kernels/cpu/gemm/gemm_levels.h"
#include "kernels/cpu/gemm/gemm_micro.h"
#include "kernels/cpu/gemm/gemm_pack.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr std::int64_t kBlockK = 384, kBlockM = 480, kBlockN = 512;
constexpr std::int64_t kPad = 16;  // floats after a packed row of A: neighbours start in different cache sets

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }
constexpr std::int64_t smaller(std::int64_t x, std::int64_t y) { return x < y ? x : y; }

// Pieces of at most `limit`, all about equal, multiples of `unit`.
constexpr std::int64_t even_block(std::int64_t total, std::int64_t limit, std::int64_t unit) {
  if (total <= limit) return total;
  return ceil_div(ceil_div(total, ceil_div(total, limit)), unit) * unit;
}

template <class T>
GemmPlan plan(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const T> a, MatrixRef<const T> b) {
  GemmPlan p{};
  const bool a_rows = a.col_stride == 1;
  p.dot = a_rows && b.row_stride == 1 && (m <= 2 * kDotRows || n < 4);
  // Packing B costs about as much as a dozen rows of the GEMM; from a few row tiles on, its better locality pays.
  p.b_in_place = b.col_stride == 1 && m <= 12 * kMaxRows;
  // Rows a multiple of 4 KiB apart share their cache sets.
  const bool sets_clash = a.row_stride * static_cast<std::int64_t>(sizeof(T)) % 2048 == 0 && a.row_stride != 0;
  p.a_in_place = a_rows && !(sets_clash && m > kMaxRows && n > 4 * kPanel<T>);
  p.kc = even_block(k, m <= kMaxRows ? 2048 : kBlockK, 16);
  p.mc = even_block(m, kBlockM, kMaxRows);
  p.nc = even_block(n, kBlockN, kPanel<T>);
  std::int64_t elements = kMaxRows * kMaxPanels * kPanel<T>;
  if (!p.dot) {
    elements += ceil_div(p.b_in_place ? 1 : p.nc, kPanel<T>) * kPanel<T> * p.kc;
    if (!p.a_in_place) elements += p.mc * (p.kc + kPad);
  }
  p.workspace = static_cast<std::size_t>(elements) * sizeof(T);
  return p;
}

template <class T>
void scale(std::int64_t m, std::int64_t n, T beta, MatrixRef<T> c) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      T& x = c.data[i * c.row_stride + j * c.col_stride];
      x = beta == T(0) ? T(0) : beta * x;
    }
  }
}

// A tile that does not fit C's memory: computed aside, then merged.
template <class T>
void aside(Tile<T> tile, MicroKernel<T> kernel, int rows, std::int64_t width, int panels, T* buffer, T* c,
           std::int64_t c_row, std::int64_t c_col) {
  const T beta = tile.beta;
  tile.beta = T(0);
  tile.c = buffer;
  tile.ldc = panels * kPanel<T>;
  kernel(tile);
  for (int i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      T& to = c[i * c_row + j * c_col];
      const T v = buffer[i * tile.ldc + j];
      to = beta == T(0) ? v : v + beta * to;
    }
  }
}

template <class T>
void slice(const GemmPlan& p, std::int64_t m, std::int64_t n, std::int64_t k, T alpha, MatrixRef<const T> a,
           MatrixRef<const T> b, T beta, MatrixRef<T> c, void* workspace) {
  if (m == 0 || n == 0) return;
  if (k == 0 || alpha == T(0)) return scale(m, n, beta, c);
  if (p.dot) {
    dot_gemm(m, n, k, alpha, a.data, a.row_stride, b.data, b.col_stride, beta, c.data, c.row_stride, c.col_stride);
    return;
  }
  constexpr int P = kPanel<T>;
  T* const buffer = static_cast<T*>(workspace);
  T* const packed_b = buffer + kMaxRows * kMaxPanels * P;
  T* const packed_a = packed_b + ceil_div(p.b_in_place ? 1 : p.nc, P) * P * p.kc;
  for (std::int64_t jc = 0; jc < n; jc += p.nc) {
    const std::int64_t nb = smaller(p.nc, n - jc), panels = ceil_div(nb, P);
    for (std::int64_t pc = 0; pc < k; pc += p.kc) {
      const std::int64_t kb = smaller(p.kc, k - pc);
      const T* const block_b = b.data + pc * b.row_stride + jc * b.col_stride;
      if (!p.b_in_place) {
        pack_panels(kb, nb, block_b, b.row_stride, b.col_stride, packed_b);
      } else if (nb % P != 0) {  // the last panel would be read past its end
        pack_panel(kb, nb % P, block_b + nb / P * P, b.row_stride, b.col_stride, packed_b);
      }
      for (std::int64_t ic = 0; ic < m; ic += p.mc) {
        const std::int64_t mb = smaller(p.mc, m - ic);
        const T* rows_a = a.data + ic * a.row_stride + pc * a.col_stride;
        std::int64_t lda = a.row_stride;
        if (!p.a_in_place) {
          copy_rows(mb, kb, rows_a, a.row_stride, a.col_stride, packed_a, kb + kPad);
          rows_a = packed_a, lda = kb + kPad;
        }
        const std::int64_t tiles = ceil_div(mb, kMaxRows);  // the first ones may have a row more than the others
        const int tile_m = static_cast<int>(ceil_div(mb, tiles));
        const std::int64_t fuller = mb - tiles * (tile_m - 1);
        for (std::int64_t jp = 0; jp < panels;) {
          // A tail in a panel of its own where B is read in place.
          const std::int64_t left = p.b_in_place && nb % P != 0 && jp < panels - 1 ? panels - 1 - jp : panels - jp;
          const bool tail_packed = !p.b_in_place || (nb % P != 0 && jp == panels - 1);
          const int group = choose_panels(tile_m, left);
          const std::int64_t width = smaller(static_cast<std::int64_t>(group) * P, nb - jp * P);
          Tile<T> tile{};
          tile.k = kb, tile.lda = lda, tile.alpha = alpha;
          tile.b = !tail_packed ? block_b + jp * P : p.b_in_place ? packed_b : packed_b + jp * P * kb;
          tile.row_step = tail_packed ? P : b.row_stride;
          tile.panel_step = tail_packed ? P * kb : P;
          tile.beta = pc == 0 ? beta : T(1);
          const bool fits = c.col_stride == 1 && width == group * P;
          for (std::int64_t i = 0, number = 0; number < tiles; ++number) {
            const int rows = number < fuller ? tile_m : tile_m - 1;
            T* const to = c.data + (ic + i) * c.row_stride + (jc + jp * P) * c.col_stride;
            tile.a = rows_a + i * lda;
            const MicroKernel<T> kernel = kMicro<T>.kernel[rows - 1][group - 1];
            if (fits) {
              tile.c = to, tile.ldc = c.row_stride;
              kernel(tile);
            } else {
              aside(tile, kernel, rows, width, group, buffer, to, c.row_stride, c.col_stride);
            }
            i += rows;
          }
          jp += group;
        }
      }
    }
  }
}

}  // namespace

GemmPlan plan_float(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const float> a,
                    MatrixRef<const float> b) {
  return plan(m, n, k, a, b);
}
GemmPlan plan_double(std::int64_t m, std::int64_t n, std::int64_t k, MatrixRef<const double> a,
                     MatrixRef<const double> b) {
  return plan(m, n, k, a, b);
}
void slice_float(const GemmPlan& p, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                 MatrixRef<const float> a, MatrixRef<const float> b, float beta, MatrixRef<float> c, void* workspace) {
  slice(p, m, n, k, alpha, a, b, beta, c, workspace);
}
void slice_double(const GemmPlan& p, std::int64_t m, std::int64_t n, std::int64_t k, double alpha,
                  MatrixRef<const double> a, MatrixRef<const double> b, double beta, MatrixRef<double> c,
                  void* workspace) {
  slice(p, m, n, k, alpha, a, b, beta, c, workspace);
}
void pack_slice(std::int64_t k, std::int64_t n, MatrixRef<const float> b, float* packed) {
  pack_panels(k, n, b.data, b.row_stride, b.col_stride, packed);
}
int tile_rows() { return kMaxRows; }

}  // namespace untorch::kernels::UNTORCH_ISA
