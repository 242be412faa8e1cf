// Distances between rows, a row of results at a time; the Euclidean norm also by GEMM. Trilinear: a result at a time.
#include "kernels/distance.h"

#include <cmath>
#include <vector>

#include "base/dispatch.h"
#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels::cpu {
namespace {

// The p-norm of a - b over n values.
template <class T>
T distance(const T* a, const T* b, std::int64_t n, double p) {
  T sum = 0;
  if (p == 0.0) {
    for (std::int64_t i = 0; i < n; ++i) sum += a[i] != b[i] ? T(1) : T(0);
    return sum;
  }
  if (p == 1.0) {
    for (std::int64_t i = 0; i < n; ++i) sum += std::abs(a[i] - b[i]);
    return sum;
  }
  if (p == 2.0) {
    for (std::int64_t i = 0; i < n; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
    return std::sqrt(sum);
  }
  if (std::isinf(p)) {
    for (std::int64_t i = 0; i < n; ++i) {
      const T d = std::abs(a[i] - b[i]);
      if (d > sum || d != d) sum = d;
    }
    return sum;
  }
  for (std::int64_t i = 0; i < n; ++i) sum += std::pow(std::abs(a[i] - b[i]), static_cast<T>(p));
  return std::pow(sum, static_cast<T>(1.0 / p));
}

template <class T>
void euclidean_by_gemm(const T* a, const T* b, std::int64_t rows, std::int64_t columns, std::int64_t n, T* out) {
  std::vector<T> right(static_cast<std::size_t>(columns));
  for (std::int64_t j = 0; j < columns; ++j) {
    T sum = 0;
    for (std::int64_t k = 0; k < n; ++k) sum += b[j * n + k] * b[j * n + k];
    right[static_cast<std::size_t>(j)] = sum;
  }
  for (std::int64_t i = 0; i < rows; ++i) {
    T left = 0;
    for (std::int64_t k = 0; k < n; ++k) left += a[i * n + k] * a[i * n + k];
    for (std::int64_t j = 0; j < columns; ++j) out[i * columns + j] = left + right[static_cast<std::size_t>(j)];
  }
  kernels::gemm(rows, columns, n, T(-2), {a, n, 1}, {b, 1, n}, T(1), {out, columns, 1});
  for (std::int64_t i = 0; i < rows * columns; ++i) out[i] = std::sqrt(out[i] < T(0) ? T(0) : out[i]);
}

template <class T>
void distances_of(const Distances& d) {
  const auto *const left = static_cast<const T*>(d.left), *const right = static_cast<const T*>(d.right);
  auto* const out = static_cast<T*>(d.out);
  const std::int64_t rows = d.rows, columns = d.columns, n = d.length;
  if (d.condensed) {
    const double work = static_cast<double>(rows) * static_cast<double>(rows - 1) / 2 * static_cast<double>(n);
    for_each_item(rows, work > kParallelWork, [&](std::int64_t i) {
      T* to = out + i * rows - i * (i + 1) / 2;  // pairs (i, i+1 …) follow those of the rows before
      for (std::int64_t j = i + 1; j < rows; ++j) to[j - i - 1] = distance(left + i * n, right + j * n, n, d.p);
    });
    return;
  }
  if (d.by_gemm) {
    for (std::int64_t i = 0; i < d.batch; ++i) {
      euclidean_by_gemm(left + i * rows * n, right + i * columns * n, rows, columns, n, out + i * rows * columns);
    }
    return;
  }
  const double work = static_cast<double>(d.batch * rows * columns) * static_cast<double>(n);
  for_each_item_grained(d.batch * rows, 8, work > kParallelWork, [&](std::int64_t row) {
    const T* base = right + row / rows * columns * n;
    for (std::int64_t j = 0; j < columns; ++j) {
      out[row * columns + j] = distance(left + row * n, base + j * n, n, d.p);
    }
  });
}

// The operands' element offsets of the iteration space's element `index`, added to `at`.
template <int N>
void locate(const Strided<N>& space, std::int64_t index, std::int64_t (&at)[N]) {
  for (int d = 0; d < space.ndim; ++d) {
    const std::int64_t i = index % space.sizes[d];
    index /= space.sizes[d];
    for (int k = 0; k < N; ++k) at[k] += i * space.strides[k][d];
  }
}

}  // namespace

void distances(const Distances& d) {
  if (d.dtype == DType::kFloat64) return distances_of<double>(d);
  return distances_of<float>(d);
}

void trilinear(const Trilinear& p) {
  dispatch_floating("_trilinear", p.dtype, [&]<class T>() {
    using C = compute_t<T>;
    const auto *const a = static_cast<const T*>(p.a), *const b = static_cast<const T*>(p.b),
                      *const c = static_cast<const T*>(p.c);
    auto* const out = static_cast<T*>(p.out);
    const double work = static_cast<double>(p.outer.numel) * static_cast<double>(p.inner.numel);
    for_each_item_grained(p.outer.numel, 64, work > kParallelWork, [&](std::int64_t i) {
      std::int64_t base[4] = {};
      locate(p.outer, i, base);
      C sum = 0;
      for (std::int64_t j = 0; j < p.inner.numel; ++j) {
        std::int64_t at[3] = {base[1], base[2], base[3]};
        locate(p.inner, j, at);
        sum += static_cast<C>(a[at[0]]) * static_cast<C>(b[at[1]]) * static_cast<C>(c[at[2]]);
      }
      out[base[0]] = T(sum);
    });
  });
}

}  // namespace untorch::kernels::cpu
