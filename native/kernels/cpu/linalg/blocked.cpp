// Blocked TRSM, GEQRF and ORMQR: a small diagonal block or panel is computed by plain loops, the trailing matrix is
// updated by GEMM.
//
// TRSM: 64 rows of the triangle, dense and by columns in scratch, are solved a column of B at a time; the rows that
// wait for them take one GEMM. GEQRF and ORMQR: panels of 32 Householder vectors in compact WY form, 1 - V·S·Vᵀ,
// applied by three GEMMs. Complex matrices take plain loops throughout. Large real problems run at the rate of the GEMM
// (2·n²·columns and about 2·m·n·k operations); the share of the roofline has not been measured.
#include "kernels/cpu/linalg/blocked.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "kernels/cpu/common/parallel_items.h"

namespace untorch::kernels::cpu {
namespace {

// Rows of a triangle that are solved one by one before GEMM updates the rest.
constexpr std::int64_t kBlock = 64;

template <class T>
struct Real {
  using type = T;
};
template <class R>
struct Real<std::complex<R>> {
  using type = R;
};
template <class T>
using real_t = typename Real<T>::type;
template <class T>
constexpr bool kComplex = !std::is_same_v<T, real_t<T>>;

template <class T>
T conjugate_if(bool conjugate, T value) {
  if constexpr (kComplex<T>) {
    return conjugate ? std::conj(value) : value;
  } else {
    return value;
  }
}

// Written out: std::complex's operator* calls a library function to repair infinities.
template <class T>
T times(T x, T y) {
  if constexpr (kComplex<T>) {
    return {x.real() * y.real() - x.imag() * y.imag(), x.real() * y.imag() + x.imag() * y.real()};
  } else {
    return x * y;
  }
}

// Σ conj(x)·y. Eight partial sums, so that the compiler may use vectors without reordering anything.
template <class T>
T dot(std::int64_t length, const T* x, const T* y) {
  T sums[8]{};
  std::int64_t i = 0;
  for (; i + 8 <= length; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += times(conjugate_if(true, x[i + lane]), y[i + lane]);
  }
  for (; i < length; ++i) sums[i % 8] += times(conjugate_if(true, x[i]), y[i]);
  return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
}

// y += factor·x.
template <class T>
void add_scaled(std::int64_t length, T factor, const T* x, T* y) {
  for (std::int64_t i = 0; i < length; ++i) y[i] += times(factor, x[i]);
}

bool worth_threads(double operations, bool serial) { return !serial && operations > kParallelWork; }

// Columns that one thread takes at a time.
std::int64_t grain_of(double operations_a_column) {
  return static_cast<std::int64_t>(kParallelWork / std::max(operations_a_column, 1.0)) + 1;
}

// C = beta·C + alpha·A·B for real T.
template <class T>
void gemm_any(std::int64_t m, std::int64_t n, std::int64_t k, T alpha, MatrixRef<const T> a, MatrixRef<const T> b,
              T beta, MatrixRef<T> c, bool serial) {
  if (serial) {
    gemm_serial(m, n, k, alpha, a, b, beta, c);
  } else {
    gemm(m, n, k, alpha, a, b, beta, c);
  }
}

// C -= op(A)·B; A [rows, k], B [k, columns] and C [rows, columns] by columns.
template <class T>
void subtract_gemm(std::int64_t rows, std::int64_t columns, std::int64_t k, MatrixRef<const T> a, bool conjugate,
                   const T* b, T* c, std::int64_t ld, bool serial) {
  if constexpr (kComplex<T>) {
    const double work = 4.0 * static_cast<double>(rows) * static_cast<double>(k);
    for_each_item_grained(columns, grain_of(work), worth_threads(work * static_cast<double>(columns), serial),
                          [&](std::int64_t j) {
                            for (std::int64_t p = 0; p < k; ++p) {
                              const T factor = b[j * ld + p];
                              const T* column = a.data + p * a.col_stride;
                              for (std::int64_t i = 0; i < rows; ++i) {
                                c[j * ld + i] -= times(factor, conjugate_if(conjugate, column[i * a.row_stride]));
                              }
                            }
                          });
  } else {
    gemm_any<T>(rows, columns, k, T(-1), a, {b, 1, ld}, T(1), {c, 1, ld}, serial);
  }
}

// x := A⁻¹·x for one column, A [n, n] by columns, dense.
template <class T>
void solve_column(std::int64_t n, const T* a, bool upper, bool unit, T* x) {
  if (upper) {
    for (std::int64_t j = n - 1; j >= 0; --j) {
      if (!unit) x[j] /= a[j * n + j];
      add_scaled(j, -x[j], a + j * n, x);
    }
  } else {
    for (std::int64_t j = 0; j < n; ++j) {
      if (!unit) x[j] /= a[j * n + j];
      add_scaled(n - 1 - j, -x[j], a + j * n + j + 1, x + j + 1);
    }
  }
}

// Turns x [n] into (beta, v[1:]) with H·x = (beta, 0, …), gives tau. As ?larfg: beta is real and has the sign opposite
// to x[0]; tau is 0 when nothing is to be done.
template <class T>
T make_reflection(std::int64_t n, T* x) {
  using R = real_t<T>;
  R largest = 0;  // the norm is taken of scaled values: squares must neither overflow nor vanish
  const auto parts_of = [](T value, auto&& use) {
    if constexpr (kComplex<T>) {
      use(value.real());
      use(value.imag());
    } else {
      use(value);
    }
  };
  bool tail_is_zero = true;
  for (std::int64_t i = 0; i < n; ++i) {
    parts_of(x[i], [&](R part) {
      largest = std::isnan(part) ? part : std::max(largest, std::abs(part));
      tail_is_zero = tail_is_zero && (i == 0 || part == R(0));
    });
  }
  R head = 0, head_imaginary = 0;
  if constexpr (kComplex<T>) {
    head = x[0].real(), head_imaginary = x[0].imag();
  } else {
    head = x[0];
  }
  if (tail_is_zero && head_imaginary == R(0)) return T(0);
  R sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    parts_of(x[i], [&](R part) { sum += (part / largest) * (part / largest); });
  }
  const R beta = -std::copysign(largest * std::sqrt(sum), head);
  const T divisor = x[0] - T(beta);
  for (std::int64_t i = 1; i < n; ++i) x[i] /= divisor;
  x[0] = T(beta);
  if constexpr (kComplex<T>) {
    return {(beta - head) / beta, -head_imaginary / beta};
  } else {
    return (beta - head) / beta;
  }
}

// c [n] := (1 - tau·v·vᴴ)·c, v [n] with its leading 1 not stored.
template <class T>
void reflect(std::int64_t n, const T* v, T tau, T* c) {
  const T factor = -times(tau, c[0] + dot(n - 1, v + 1, c + 1));
  c[0] += factor;
  add_scaled(n - 1, factor, v + 1, c + 1);
}

// Reflections of one panel, applied by GEMM (compact WY): H_0·…·H_(p-1) = 1 - V·S·Vᵀ with S upper triangular.
constexpr std::int64_t kPanel = 32;

// Whether panels pay for `count` reflections of rows m on so many columns. There is no complex GEMM.
template <class T>
bool in_panels(std::int64_t m, std::int64_t columns, std::int64_t count) {
  return !kComplex<T> && count >= 2 * kPanel && columns >= 2 * kPanel && m >= 2 * kPanel;
}

// C := (1 - V·S·Vᵀ)·C, or its transpose when `adjoint`, for real T; v and tau of `count` reflections as factor_qr's.
template <class T>
void apply_panel(std::int64_t m, std::int64_t columns, std::int64_t count, const T* v, std::int64_t ldv, const T* tau,
                 bool adjoint, T* c, std::int64_t ldc, bool serial) {
  const auto floats = [](std::int64_t size) { return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(size)]); };
  // V with its ones and zeros written out, VᵀV, S, VᵀC and S·VᵀC; all by columns.
  const auto full = floats(m * count), inner = floats(count * count), s = floats(count * count);
  const auto projected = floats(count * columns), scaled = floats(count * columns);
  for (std::int64_t j = 0; j < count; ++j) {
    T* column = full.get() + j * m;
    std::fill_n(column, j, T(0));
    column[j] = T(1);
    std::copy_n(v + j * ldv + j + 1, m - j - 1, column + j + 1);
  }
  const MatrixRef<const T> wide{full.get(), 1, m}, flat{full.get(), m, 1};
  gemm_any<T>(count, count, m, T(1), flat, wide, T(0), {inner.get(), 1, count}, serial);
  std::fill_n(s.get(), count * count, T(0));
  for (std::int64_t j = 0; j < count; ++j) {
    T* column = s.get() + j * count;
    column[j] = tau[j];
    for (std::int64_t i = 0; i < j; ++i) {  // -tau_j · S[:j, :j] · (VᵀV)[:j, j]
      T sum = 0;
      for (std::int64_t k = i; k < j; ++k)
        sum += s[static_cast<std::size_t>(k * count + i)] * inner[static_cast<std::size_t>(j * count + k)];
      column[i] = -tau[j] * sum;
    }
  }
  const MatrixRef<const T> factor{s.get(), adjoint ? count : 1, adjoint ? 1 : count};
  gemm_any<T>(count, columns, m, T(1), flat, {c, 1, ldc}, T(0), {projected.get(), 1, count}, serial);
  gemm_any<T>(count, columns, count, T(1), factor, {projected.get(), 1, count}, T(0), {scaled.get(), 1, count}, serial);
  gemm_any<T>(m, columns, count, T(-1), wide, {scaled.get(), 1, count}, T(1), {c, 1, ldc}, serial);
}

}  // namespace

template <class T>
void solve_triangular(std::int64_t n, std::int64_t columns, MatrixRef<const T> a, Triangle triangle, T* b,
                      std::int64_t ldb, bool serial) {
  if (n == 0 || columns == 0) return;
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const std::int64_t width = std::min(n, kBlock);
  const std::unique_ptr<T[]> diagonal(new T[static_cast<std::size_t>(width * width)]);
  for (std::int64_t step = 0; step < blocks; ++step) {
    const std::int64_t start = (triangle.upper ? blocks - 1 - step : step) * kBlock;
    const std::int64_t size = std::min(kBlock, n - start);
    const T* corner = a.data + start * (a.row_stride + a.col_stride);
    for (std::int64_t j = 0; j < size; ++j) {
      const std::int64_t from = triangle.upper ? 0 : j, to = triangle.upper ? j + 1 : size;
      for (std::int64_t i = from; i < to; ++i) {
        diagonal[static_cast<std::size_t>(j * size + i)] =
            conjugate_if(triangle.conjugate, corner[i * a.row_stride + j * a.col_stride]);
      }
    }
    const double work = static_cast<double>(size) * static_cast<double>(size);
    for_each_item_grained(columns, grain_of(work), worth_threads(work * static_cast<double>(columns), serial),
                          [&](std::int64_t j) {
                            solve_column(size, diagonal.get(), triangle.upper, triangle.unit, b + j * ldb + start);
                          });
    const std::int64_t first = triangle.upper ? 0 : start + size;  // of the rows that wait for this block
    const std::int64_t rest = triangle.upper ? start : n - first;
    if (rest == 0) continue;
    const MatrixRef<const T> below{a.data + first * a.row_stride + start * a.col_stride, a.row_stride, a.col_stride};
    subtract_gemm(rest, columns, size, below, triangle.conjugate, b + start, b + first, ldb, serial);
  }
}

template <class T>
void factor_qr(std::int64_t m, std::int64_t n, T* a, std::int64_t lda, T* tau, bool serial) {
  const std::int64_t count = std::min(m, n), panel = in_panels<T>(m, n, count) ? kPanel : count;
  for (std::int64_t start = 0; start < count; start += panel) {
    const std::int64_t stop = std::min(start + panel, count);
    const std::int64_t columns = stop < count ? stop : n;  // the last panel takes along what lies to its right
    for (std::int64_t i = start; i < stop; ++i) {
      T* v = a + i * lda + i;
      tau[i] = make_reflection(m - i, v);
      if (tau[i] == T(0)) continue;
      const T factor = conjugate_if(true, tau[i]);  // R comes from Qᴴ·A
      const double work = 4.0 * static_cast<double>(m - i);
      const bool alone = serial || panel < count;  // a panel is too narrow for threads
      for_each_item_grained(columns - i - 1, grain_of(work),
                            worth_threads(work * static_cast<double>(columns - i - 1), alone),
                            [&](std::int64_t j) { reflect(m - i, v, factor, v + (j + 1) * lda); });
    }
    if constexpr (!kComplex<T>) {
      if (columns < n) {
        T* corner = a + start * lda + start;
        apply_panel(m - start, n - stop, stop - start, corner, lda, tau + start, true, corner + (stop - start) * lda,
                    lda, serial);
      }
    }
  }
}

template <class T>
void apply_reflections(std::int64_t m, std::int64_t columns, std::int64_t count, const T* v, std::int64_t ldv,
                       const T* tau, bool adjoint, T* c, std::int64_t ldc, bool serial) {
  if constexpr (!kComplex<T>) {
    if (in_panels<T>(m, columns, count)) {
      const std::int64_t panels = (count + kPanel - 1) / kPanel;
      for (std::int64_t step = 0; step < panels; ++step) {
        const std::int64_t start = (adjoint ? step : panels - 1 - step) * kPanel;
        apply_panel(m - start, columns, std::min(kPanel, count - start), v + start * ldv + start, ldv, tau + start,
                    adjoint, c + start, ldc, serial);
      }
      return;
    }
  }
  const double work = 4.0 * static_cast<double>(m) * static_cast<double>(count);
  for_each_item_grained(columns, grain_of(work), worth_threads(work * static_cast<double>(columns), serial),
                        [&](std::int64_t j) {
                          for (std::int64_t step = 0; step < count; ++step) {
                            const std::int64_t i = adjoint ? step : count - 1 - step;
                            if (tau[i] == T(0)) continue;
                            reflect(m - i, v + i * ldv + i, conjugate_if(adjoint, tau[i]), c + j * ldc + i);
                          }
                        });
}

#define UNTORCH_LINALG(T)                                                                                              \
  template void solve_triangular<T>(std::int64_t, std::int64_t, MatrixRef<const T>, Triangle, T*, std::int64_t, bool); \
  template void factor_qr<T>(std::int64_t, std::int64_t, T*, std::int64_t, T*, bool);                                  \
  template void apply_reflections<T>(std::int64_t, std::int64_t, std::int64_t, const T*, std::int64_t, const T*, bool, \
                                     T*, std::int64_t, bool);
UNTORCH_LINALG(float)
UNTORCH_LINALG(double)
UNTORCH_LINALG(std::complex<float>)
UNTORCH_LINALG(std::complex<double>)
#undef UNTORCH_LINALG

}  // namespace untorch::kernels::cpu
