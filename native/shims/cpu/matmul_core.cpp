// Matrix products of every dtype, and the checks that the operators share.
#include <omp.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <string_view>
#include <type_traits>

#include "shims/cpu/matmul.h"

namespace untorch::shims {
namespace {

using kernels::MatrixRef;

template <class T>
void multiply_float(const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta, double alpha,
                    bool serial) {
  const auto run = [&](auto&& gemm) {
    gemm(c.rows, c.cols, a.cols, static_cast<T>(alpha), typed<const T>(a), typed<const T>(b), static_cast<T>(beta),
         typed<T>(c));
  };
  if (serial) {
    run([](auto... args) { kernels::gemm_serial(args...); });
  } else {
    run([](auto... args) { kernels::gemm(args...); });
  }
}

bool worth_threads(std::int64_t elements, bool serial) { return !serial && elements > 32768 && !omp_in_parallel(); }

// A float copy in the order of the source's memory, so that both sides of the conversion run along it.
class FloatCopy {
 public:
  template <class T>
  FloatCopy(std::type_identity<T>, const MatrixView& from, bool fill, bool serial)
      : values_(new float[static_cast<std::size_t>(std::max<std::int64_t>(from.rows * from.cols, 1))]), view_(from) {
    view_.data = reinterpret_cast<std::byte*>(values_.get());
    const bool by_columns = from.row_stride == 1 && from.col_stride != 1;
    view_.row_stride = by_columns ? 1 : from.cols;
    view_.col_stride = by_columns ? from.rows : 1;
    if (fill) {
      each_line<T>(from, serial, [](const T* half, std::int64_t stride, float* value, std::int64_t length) {
        for (std::int64_t j = 0; j < length; ++j) value[j] = static_cast<float>(half[j * stride]);
      });
    }
  }
  const MatrixView& view() const { return view_; }

  template <class T>
  void write(std::type_identity<T>, const MatrixView& to, bool serial) const {
    each_line<T>(to, serial, [](T* half, std::int64_t stride, const float* value, std::int64_t length) {
      for (std::int64_t j = 0; j < length; ++j) half[j * stride] = T(value[j]);
    });
  }

 private:
  template <class T, class Fn>
  void each_line(const MatrixView& halves, bool serial, Fn&& fn) const {
    const bool by_columns = view_.row_stride == 1 && view_.col_stride != 1;
    const std::int64_t lines = by_columns ? view_.cols : view_.rows, length = by_columns ? view_.rows : view_.cols;
    const std::int64_t line_stride = by_columns ? halves.col_stride : halves.row_stride;
    const std::int64_t stride = by_columns ? halves.row_stride : halves.col_stride;
    T* const from = reinterpret_cast<T*>(halves.data);
    float* const to = values_.get();
#pragma omp parallel for if (worth_threads(lines * length, serial))
    for (std::int64_t i = 0; i < lines; ++i) fn(from + i * line_stride, stride, to + i * length, length);
  }

  std::unique_ptr<float[]> values_;
  MatrixView view_;
};

template <class T>
void multiply_half(const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta, double alpha,
                   bool serial) {
  constexpr std::type_identity<T> type{};
  const FloatCopy left(type, a, true, serial), right(type, b, true, serial);
  const FloatCopy result(type, c, beta != 0.0, serial);
  multiply_float<float>(left.view(), right.view(), result.view(), beta, alpha, serial);
  result.write(type, c, serial);
}

// alpha and beta become integers, as in PyTorch; sums wrap around.
template <class T>
void multiply_integer(const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta, double alpha,
                      bool serial) {
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
void multiply_complex(const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta, double alpha,
                      bool serial) {
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

}  // namespace

MatrixView matrix_of(const Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.raw()), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

MatrixView matrix_of(const Tensor& batch, std::int64_t index) {
  const auto bytes = static_cast<std::int64_t>(element_size(batch.dtype()));
  return {static_cast<std::byte*>(batch.raw()) + index * batch.stride(0) * bytes, batch.size(1), batch.size(2),
          batch.stride(1), batch.stride(2)};
}

void multiply(const char* op, DType dtype, const MatrixView& a, const MatrixView& b, const MatrixView& c, double beta,
              double alpha, bool serial) {
  if (c.rows == 0 || c.cols == 0) return;
  switch (dtype) {
    case DType::kFloat32:
      return multiply_float<float>(a, b, c, beta, alpha, serial);
    case DType::kFloat64:
      return multiply_float<double>(a, b, c, beta, alpha, serial);
    case DType::kFloat16:
      return multiply_half<Half>(a, b, c, beta, alpha, serial);
    case DType::kBFloat16:
      return multiply_half<BFloat16>(a, b, c, beta, alpha, serial);
    case DType::kUInt8:
      return multiply_integer<std::uint8_t>(a, b, c, beta, alpha, serial);
    case DType::kInt8:
      return multiply_integer<std::int8_t>(a, b, c, beta, alpha, serial);
    case DType::kInt16:
      return multiply_integer<std::int16_t>(a, b, c, beta, alpha, serial);
    case DType::kInt32:
      return multiply_integer<std::int32_t>(a, b, c, beta, alpha, serial);
    case DType::kInt64:
      return multiply_integer<std::int64_t>(a, b, c, beta, alpha, serial);
    case DType::kComplex64:
      return multiply_complex<float>(a, b, c, beta, alpha, serial);
    case DType::kComplex128:
      return multiply_complex<double>(a, b, c, beta, alpha, serial);
    default:
      throw_error(
          ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype),
          " is not supported, expected a floating, signed integer, uint8 or complex dtype; convert the operands");
  }
}

void multiply_batch(const char* op, const Tensor& a, const Tensor& b, const Tensor& c, double beta, double alpha) {
  const std::int64_t batch = c.size(0);
  const double operations = 2.0 * static_cast<double>(c.numel()) * static_cast<double>(a.size(2));
  const int threads = omp_in_parallel() ? 1 : omp_get_max_threads();
  if (batch == 0) return;
  const auto one = [&](std::int64_t i, bool serial) {
    multiply(op, a.dtype(), matrix_of(a, i), matrix_of(b, i), matrix_of(c, i), beta, alpha, serial);
  };
  if (threads == 1 || operations < 1e6 || batch < threads) {
    for (std::int64_t i = 0; i < batch; ++i) one(i, operations < 1e6);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for schedule(static)
  for (std::int64_t i = 0; i < batch; ++i) {
    try {
      one(i, true);
    } catch (...) {
#pragma omp critical(untorch_multiply_batch)
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

void seed_out(const char* op, const Tensor& out, const Tensor& self) {
  check_added(op, self, out.dtype(), out.sizes());
  const bool same = self.raw() == out.raw() && self.sizes() == out.sizes() && self.strides() == out.strides();
  if (!same) copy_cpu(out, self);
}

kernels::Activation activation_of(const char* op, const char* name) {
  using kernels::Activation;
  const std::string_view wanted = name == nullptr ? "none" : name;
  constexpr std::pair<std::string_view, Activation> kNames[] = {
      {"none", Activation::kNone},          {"relu", Activation::kRelu}, {"gelu", Activation::kGelu},
      {"gelu_tanh", Activation::kGeluTanh}, {"silu", Activation::kSilu}, {"tanh", Activation::kTanh},
      {"sigmoid", Activation::kSigmoid}};
  for (const auto& [known, activation] : kNames) {
    if (known == wanted) return activation;
  }
  throw_error(ErrorKind::kUnsupported, op, ": activation '", wanted,
              "' is not supported, expected none, relu, gelu, gelu_tanh, silu, tanh or sigmoid");
}

}  // namespace untorch::shims
