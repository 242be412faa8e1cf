// Distances between rows (cdist, pdist) and the trilinear product.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/common/parallel_items.h"
#include "kernels/cpu/gemm/gemm.h"
#include "shims/distance.h"
#include "shims/nn.h"

using namespace untorch;
using namespace untorch::shims;

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

template <class Fn>
void dispatch_wide(const char* op, DType dtype, Fn&& fn) {
  if (dtype == DType::kFloat32) return fn.template operator()<float>();
  if (dtype == DType::kFloat64) return fn.template operator()<double>();
  throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
              " is not supported, expected float32 or float64");
}

// |a|² + |b|² - 2 a·b through a matrix product: what PyTorch takes for many rows.
template <class T>
void euclidean(const T* a, const T* b, std::int64_t rows, std::int64_t columns, std::int64_t n, T* out) {
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

TensorPtr cdist(const Tensor& x1, const Tensor& x2, double p, std::int64_t mode) {
  constexpr const char* op = "_cdist_forward";
  const CdistProblem problem = cdist_problem(x1, x2, p, mode);
  const std::int64_t batch = problem.batch, rows = problem.rows, columns = problem.columns, n = problem.length;
  const Dims &lead1 = problem.left, &lead2 = problem.right, &sizes = problem.sizes;
  TensorPtr out = Tensor::empty(sizes, x1.dtype());
  if (out->numel() == 0) return out;
  const TensorPtr a = Tensor::empty(lead1, x1.dtype()), b = Tensor::empty(lead2, x1.dtype());
  copy_cpu(*a, x1);
  copy_cpu(*b, x2);
  constexpr std::int64_t kManyRows = 25;
  const bool product = p == 2.0 && n > 0 && (mode == 1 || (mode == 0 && (rows > kManyRows || columns > kManyRows)));
  dispatch_wide(op, x1.dtype(), [&]<class T>() {
    const T *left = a->data<T>(), *right = b->data<T>();
    T* to = out->data<T>();
    if (product) {
      for (std::int64_t i = 0; i < batch; ++i) {
        euclidean(left + i * rows * n, right + i * columns * n, rows, columns, n, to + i * rows * columns);
      }
      return;
    }
    const double work = static_cast<double>(out->numel()) * static_cast<double>(n);
    kernels::for_each_item_grained(batch * rows, 8, work > kernels::kParallelWork, [&](std::int64_t row) {
      const T* base = right + row / rows * columns * n;
      for (std::int64_t j = 0; j < columns; ++j) {
        to[row * columns + j] = distance(left + row * n, base + j * n, n, p);
      }
    });
  });
  return out;
}

TensorPtr pdist(const Tensor& self, double p) {
  constexpr const char* op = "_pdist_forward";
  check(self.dim() == 2, op, ": argument 'self' must be 2-D, got shape ", to_string(self.sizes()));
  check(p >= 0, op, ": argument 'p' must not be negative, got ", p);
  const std::int64_t rows = self.size(0), n = self.size(1);
  const std::int64_t pairs = rows < 2 ? 0 : rows * (rows - 1) / 2;
  TensorPtr out = Tensor::empty(Dims{pairs}, self.dtype());
  const TensorPtr x = contiguous(self);
  dispatch_wide(op, self.dtype(), [&]<class T>() {
    const double work = static_cast<double>(pairs) * static_cast<double>(n);
    kernels::for_each_item(rows, work > kernels::kParallelWork, [&](std::int64_t i) {
      T* to = out->data<T>() + i * rows - i * (i + 1) / 2;  // pairs (i, i+1 …) follow those of the rows before
      for (std::int64_t j = i + 1; j < rows; ++j) {
        to[j - i - 1] = distance(x->data<T>() + i * n, x->data<T>() + j * n, n, p);
      }
    });
  });
  return out;
}

TensorPtr trilinear(const Tensor& i1, const Tensor& i2, const Tensor& i3, DimSpan expand1, DimSpan expand2,
                    DimSpan expand3, DimSpan sumdim) {
  constexpr const char* op = "_trilinear";
  using Loop = TrilinearProblem::Loop;
  const TrilinearProblem problem = trilinear_problem(i1, i2, i3, expand1, expand2, expand3, sumdim);
  const auto &outer = problem.outer, &inner = problem.inner;
  TensorPtr out = Tensor::empty(DimSpan{problem.sizes}, i1.dtype());
  if (out->numel() == 0) return out;
  std::int64_t terms = 1;
  for (const Loop& loop : inner) terms *= loop.size;
  const auto locate = [](const std::vector<Loop>& loops, std::int64_t index, std::int64_t at[3]) {
    for (std::size_t d = loops.size(); d-- > 0;) {
      const std::int64_t i = index % loops[d].size;
      index /= loops[d].size;
      for (int k = 0; k < 3; ++k) at[k] += i * loops[d].stride[k];
    }
  };
  dispatch_floating(op, i1.dtype(), [&]<class T>() {
    using C = compute_t<T>;
    const T *a = i1.data<T>(), *b = i2.data<T>(), *c = i3.data<T>();
    const double work = static_cast<double>(out->numel()) * static_cast<double>(terms);
    kernels::for_each_item_grained(out->numel(), 64, work > kernels::kParallelWork, [&](std::int64_t i) {
      std::int64_t base[3] = {0, 0, 0};
      locate(outer, i, base);
      C sum = 0;
      for (std::int64_t j = 0; j < terms; ++j) {
        std::int64_t at[3] = {base[0], base[1], base[2]};
        locate(inner, j, at);
        sum += static_cast<C>(a[at[0]]) * static_cast<C>(b[at[1]]) * static_cast<C>(c[at[2]]);
      }
      out->data<T>()[i] = T(sum);
    });
  });
  return out;
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__cdist_forward(AtenTensorHandle x1, AtenTensorHandle x2, double p,
                                           std::int64_t* compute_mode, AtenTensorHandle* ret0) {
  constexpr const char* op = "_cdist_forward";
  return guarded(op, [&] {
    const std::int64_t mode = compute_mode == nullptr ? 0 : *compute_mode;
    give(ret0, cdist(cpu_input(x1, op, "x1"), cpu_input(x2, op, "x2"), p, mode), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu__pdist_forward(AtenTensorHandle self, double p, AtenTensorHandle* ret0) {
  return guarded("_pdist_forward",
                 [&] { give(ret0, pdist(cpu_input(self, "_pdist_forward", "self"), p), "_pdist_forward"); });
}

// unroll_dim is a hint on the order of the work, it does not change the result.
UNTORCH_SHIM aoti_torch_cpu__trilinear(AtenTensorHandle i1, AtenTensorHandle i2, AtenTensorHandle i3,
                                       const std::int64_t* expand1, std::int64_t expand1_len,
                                       const std::int64_t* expand2, std::int64_t expand2_len,
                                       const std::int64_t* expand3, std::int64_t expand3_len,
                                       const std::int64_t* sumdim, std::int64_t sumdim_len, std::int64_t /*unroll_dim*/,
                                       AtenTensorHandle* ret0) {
  constexpr const char* op = "_trilinear";
  return guarded(op, [&] {
    give(
        ret0,
        trilinear(cpu_input(i1, op, "i1"), cpu_input(i2, op, "i2"), cpu_input(i3, op, "i3"), ints(expand1, expand1_len),
                  ints(expand2, expand2_len), ints(expand3, expand3_len), ints(sumdim, sumdim_len)),
        op);
  });
}
