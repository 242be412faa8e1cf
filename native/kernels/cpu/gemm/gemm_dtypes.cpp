// GEMM of every dtype: floating ones by their kernels, integers and complex by plain loops; batched and grouped.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <exception>

#include "base/half.h"
#include "kernels/cpu/gemm/gemm_grouped_half.h"
#include "kernels/gemm.h"

namespace untorch::kernels::cpu {
namespace {

template <class T>
MatrixRef<T> typed(const Matrix& m) {
  return {static_cast<T*>(m.data), m.row_stride, m.col_stride};
}

template <class T>
void gemm_float(const Matrix& a, const Matrix& b, const Matrix& c, double beta, double alpha, bool serial) {
  const auto run = [&](auto&& gemm_of) {
    gemm_of(c.rows, c.cols, a.cols, static_cast<T>(alpha), typed<const T>(a), typed<const T>(b), static_cast<T>(beta),
            typed<T>(c));
  };
  if (serial) {
    run([](auto... args) { kernels::gemm_serial(args...); });
  } else {
    run([](auto... args) { kernels::gemm(args...); });
  }
}

bool worth_threads(std::int64_t elements, bool serial) { return !serial && elements > 32768 && !omp_in_parallel(); }

void gemm_half_of(HalfType type, const Matrix& a, const Matrix& b, const Matrix& c, double beta, double alpha,
                  bool serial) {
  (serial ? gemm_half_serial : gemm_half)(type, c.rows, c.cols, a.cols, static_cast<float>(alpha),
                                          typed<const std::uint16_t>(a), typed<const std::uint16_t>(b),
                                          static_cast<float>(beta), typed<std::uint16_t>(c));
}

// alpha and beta become integers, as in PyTorch; sums wrap around.
template <class T>
void gemm_integer(const Matrix& a, const Matrix& b, const Matrix& c, double beta, double alpha, bool serial) {
  const MatrixRef<const T> x = typed<const T>(a), y = typed<const T>(b);
  const MatrixRef<T> z = typed<T>(c);
  const auto scale_in = static_cast<std::uint64_t>(static_cast<std::int64_t>(beta));
  const auto scale = static_cast<std::uint64_t>(static_cast<std::int64_t>(alpha));
#pragma omp parallel for if (worth_threads(c.rows * c.cols * a.cols, serial))
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.cols; ++j) {
      std::uint64_t sum = 0;
      for (std::int64_t k = 0; k < a.cols; ++k) {
        sum += static_cast<std::uint64_t>(x.data[i * x.row_stride + k * x.col_stride]) *
               static_cast<std::uint64_t>(y.data[k * y.row_stride + j * y.col_stride]);
      }
      T& to = z.data[i * z.row_stride + j * z.col_stride];
      sum *= scale;
      if (scale_in != 0) sum += scale_in * static_cast<std::uint64_t>(to);
      to = static_cast<T>(sum);
    }
  }
}

template <class T>
void gemm_complex(const Matrix& a, const Matrix& b, const Matrix& c, double beta, double alpha, bool serial) {
  using C = Complex<T>;
  const MatrixRef<const C> x = typed<const C>(a), y = typed<const C>(b);
  const MatrixRef<C> z = typed<C>(c);
  const T scale_in = static_cast<T>(beta), scale = static_cast<T>(alpha);
#pragma omp parallel for if (worth_threads(c.rows * c.cols * a.cols, serial))
  for (std::int64_t i = 0; i < c.rows; ++i) {
    for (std::int64_t j = 0; j < c.cols; ++j) {
      C sum{T(0), T(0)};
      for (std::int64_t k = 0; k < a.cols; ++k) {
        const C p = x.data[i * x.row_stride + k * x.col_stride], q = y.data[k * y.row_stride + j * y.col_stride];
        sum.re += p.re * q.re - p.im * q.im;
        sum.im += p.re * q.im + p.im * q.re;
      }
      C& to = z.data[i * z.row_stride + j * z.col_stride];
      sum.re *= scale, sum.im *= scale;
      if (scale_in != T(0)) sum.re += scale_in * to.re, sum.im += scale_in * to.im;
      to = sum;
    }
  }
}

// One matrix. `serial` keeps it on the calling thread.
void gemm_one(const Matrix& a, const Matrix& b, const Matrix& c, double beta, double alpha, bool serial) {
  if (c.rows == 0 || c.cols == 0) return;
  switch (c.dtype) {
    case DType::kFloat32:
      return gemm_float<float>(a, b, c, beta, alpha, serial);
    case DType::kFloat64:
      return gemm_float<double>(a, b, c, beta, alpha, serial);
    case DType::kFloat16:
      return gemm_half_of(HalfType::kFloat16, a, b, c, beta, alpha, serial);
    case DType::kBFloat16:
      return gemm_half_of(HalfType::kBFloat16, a, b, c, beta, alpha, serial);
    case DType::kUInt8:
      return gemm_integer<std::uint8_t>(a, b, c, beta, alpha, serial);
    case DType::kInt8:
      return gemm_integer<std::int8_t>(a, b, c, beta, alpha, serial);
    case DType::kInt16:
      return gemm_integer<std::int16_t>(a, b, c, beta, alpha, serial);
    case DType::kInt32:
      return gemm_integer<std::int32_t>(a, b, c, beta, alpha, serial);
    case DType::kInt64:
      return gemm_integer<std::int64_t>(a, b, c, beta, alpha, serial);
    case DType::kComplex64:
      return gemm_complex<float>(a, b, c, beta, alpha, serial);
    case DType::kComplex128:
      return gemm_complex<double>(a, b, c, beta, alpha, serial);
    default:
      return;  // has_gemm said so
  }
}

// Matrix `index` of a batch.
Matrix at(const Matrix& m, std::int64_t index) {
  Matrix out = m;
  out.data =
      static_cast<std::byte*>(m.data) + index * m.batch_stride * static_cast<std::int64_t>(element_size(m.dtype));
  out.batch = 1;
  return out;
}

}  // namespace

bool has_gemm(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kFloat64:
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kUInt8:
    case DType::kInt8:
    case DType::kInt16:
    case DType::kInt32:
    case DType::kInt64:
    case DType::kComplex64:
    case DType::kComplex128:
      return true;
    default:
      return false;
  }
}

void gemm(const Matrix& a, const Matrix& b, const Matrix& out, double alpha, double beta) {
  const std::int64_t batch = out.batch;
  if (batch == 0) return;
  if (batch == 1) return gemm_one(a, b, out, beta, alpha, false);
  const double operations = 2.0 * static_cast<double>(batch) * static_cast<double>(out.rows) *
                            static_cast<double>(out.cols) * static_cast<double>(a.cols);
  const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  if (threads == 1 || operations < 1e6 || batch < threads) {
    for (std::int64_t i = 0; i < batch; ++i) gemm_one(at(a, i), at(b, i), at(out, i), beta, alpha, operations < 1e6);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < batch; ++i) {
    try {
      gemm_one(at(a, i), at(b, i), at(out, i), beta, alpha, true);
    } catch (...) {
#pragma omp critical(untorch_gemm_batch)
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void gemm_sum_batch(const Matrix& a, const Matrix& b, const Matrix& out, double alpha, double beta) {
  if (a.batch == 0) {  // an empty sum, to carry beta
    Matrix left = a, right = b;
    left.cols = right.rows = 0;
    return gemm_one(left, right, out, beta, alpha, false);
  }
  for (std::int64_t i = 0; i < a.batch; ++i) gemm_one(at(a, i), at(b, i), out, i == 0 ? beta : 1.0, alpha, false);
}

std::int64_t gemm_grouped(const GroupedGemm& p) {
  const auto* const ends = static_cast<const std::int32_t*>(p.ends);
  const std::int64_t total = p.along_k ? p.k : p.m;
  std::int64_t start = 0;
  for (std::int64_t g = 0; g < p.groups; ++g) {
    const std::int64_t end = ends[g * p.ends_stride];
    if (end < start || end > total) return g;
    start = end;
  }
  const auto matrix = [&](const void* data, std::int64_t offset, std::int64_t rows, std::int64_t cols, std::int64_t row,
                          std::int64_t col) {
    auto* const first = static_cast<std::byte*>(const_cast<void*>(data));
    return Matrix{
        first + offset * static_cast<std::int64_t>(element_size(p.dtype)), p.dtype, 1, rows, cols, 0, row, col};
  };
  const bool half = has_grouped_half(p);
  if (half) grouped_half(p);
  start = 0;
  for (std::int64_t g = 0; g < p.groups; ++g) {
    const std::int64_t end = ends[g * p.ends_stride], length = end - start;
    if (half) {
      // done
    } else if (p.along_k) {
      gemm_one(matrix(p.a, start * p.a_col, p.m, length, p.a_row, p.a_col),
               matrix(p.b, start * p.b_row, length, p.n, p.b_row, p.b_col),
               matrix(p.out, g * p.out_group, p.m, p.n, p.out_row, p.out_col), 0.0, 1.0, false);
    } else {
      gemm_one(matrix(p.a, start * p.a_row, length, p.k, p.a_row, p.a_col),
               matrix(p.b, g * p.b_group, p.k, p.n, p.b_row, p.b_col),
               matrix(p.out, start * p.out_row, length, p.n, p.out_row, p.out_col), 0.0, 1.0, false);
    }
    start = end;
  }
  if (!p.along_k && start < p.m) {  // an empty sum is 0
    gemm_one(matrix(p.a, 0, p.m - start, 0, p.a_row, p.a_col), matrix(p.b, 0, 0, p.n, p.b_row, p.b_col),
             matrix(p.out, start * p.out_row, p.m - start, p.n, p.out_row, p.out_col), 0.0, 1.0, false);
  }
  return -1;
}

void activate(DType dtype, std::int64_t m, std::int64_t n, Activation activation, void* values) {
  if (dtype == DType::kFloat32) return apply_activation(m, n, activation, static_cast<float*>(values), n);
  auto* const x = static_cast<double*>(values);
  for (std::int64_t i = 0; i < m * n; ++i) {
    x[i] = activation == Activation::kGelu ? 0.5 * x[i] * (1.0 + std::erf(x[i] * 0.70710678118654752440))
           : x[i] < 0.0                    ? 0.0
                                           : x[i];
  }
}

namespace {

template <class Fn>
void map_in_place(float* values, std::int64_t count, Fn&& fn) {
#pragma omp parallel for if (count > 32768)
  for (std::int64_t i = 0; i < count; ++i) values[i] = fn(values[i], i);
}

}  // namespace

void post_op(PostOp op, std::int64_t count, float first, float second, float* values) {
  switch (op) {
    case PostOp::kHardswish:
      return map_in_place(values, count,
                          [](float x, std::int64_t) { return x * std::min(std::max(x + 3.0f, 0.0f), 6.0f) / 6.0f; });
    case PostOp::kLeakyRelu:
      return map_in_place(values, count, [first](float x, std::int64_t) { return x < 0.0f ? x * first : x; });
    case PostOp::kHardtanh:
      return map_in_place(values, count, [first, second](float x, std::int64_t) {
        return x < first ? first : x > second ? second : x;
      });
  }
}

void post_op(BinaryPostOp op, std::int64_t count, const float* other, float* values) {
  switch (op) {
    case BinaryPostOp::kAdd:
      return map_in_place(values, count, [other](float x, std::int64_t i) { return x + other[i]; });
    case BinaryPostOp::kSub:
      return map_in_place(values, count, [other](float x, std::int64_t i) { return x - other[i]; });
    case BinaryPostOp::kMul:
      return map_in_place(values, count, [other](float x, std::int64_t i) { return x * other[i]; });
  }
}

}  // namespace untorch::kernels::cpu
