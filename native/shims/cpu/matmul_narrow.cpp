// Products of narrow numbers on the CPU: int8 sums, int8 weights with scales, float8 with scales.
#include <algorithm>
#include <cmath>
#include <limits>

#include "shims/cpu/matmul.h"

namespace untorch::shims {
namespace {

struct Float8Format {
  int mantissa, bias;
  float largest;
  std::uint8_t overflow;  // what larger values become
};
constexpr Float8Format kE4M3{3, 7, 448.0f, 0x7e};  // has no infinity: saturates, infinity included
constexpr Float8Format kE5M2{2, 15, 57344.0f, 0x7c};

bool is_float8(DType dtype) { return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E5M2; }
const Float8Format& format_of(DType dtype) { return dtype == DType::kFloat8E4M3FN ? kE4M3 : kE5M2; }

float decode(const Float8Format& format, std::uint8_t bits) {
  const int mantissa = bits & ((1 << format.mantissa) - 1);
  const int exponent = (bits & 0x7f) >> format.mantissa;
  float value = std::ldexp(static_cast<float>(exponent == 0 ? mantissa : mantissa + (1 << format.mantissa)),
                           std::max(exponent, 1) - format.bias - format.mantissa);
  if (format.mantissa == 3) {
    if ((bits & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
  } else if ((bits & 0x7f) >= 0x7c) {
    value = (bits & 0x7f) == 0x7c ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  return (bits & 0x80) != 0 ? -value : value;
}

std::uint8_t encode(const Float8Format& format, float value) {
  const std::uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7f);
  const float magnitude = std::fabs(value);
  if (magnitude > 2 * format.largest) return static_cast<std::uint8_t>(sign | format.overflow);
  int exponent = magnitude == 0.0f ? 1 - format.bias : std::max(std::ilogb(magnitude), 1 - format.bias);
  auto digits = static_cast<int>(std::nearbyint(std::ldexp(magnitude, format.mantissa - exponent)));
  if (digits == 2 << format.mantissa) digits >>= 1, ++exponent;
  if (std::ldexp(static_cast<float>(digits), exponent - format.mantissa) > format.largest) {
    return static_cast<std::uint8_t>(sign | format.overflow);
  }
  // A leading digit means a normal number: it carries one into the exponent field.
  const int field = ((exponent + format.bias - 1) << format.mantissa) + digits;
  return static_cast<std::uint8_t>(sign | field);
}

// A row-major float copy of a float8 matrix.
TensorPtr widen(const Tensor& tensor) {
  float table[256];
  for (int i = 0; i < 256; ++i) table[i] = decode(format_of(tensor.dtype()), static_cast<std::uint8_t>(i));
  TensorPtr out = Tensor::empty(tensor.sizes(), DType::kFloat32);
  float* to = out->data<float>();
  const auto* from = tensor.data<std::uint8_t>();
  for (std::int64_t i = 0; i < tensor.size(0); ++i) {
    for (std::int64_t j = 0; j < tensor.size(1); ++j) *to++ = table[from[i * tensor.stride(0) + j * tensor.stride(1)]];
  }
  return out;
}

TensorPtr narrow(const Tensor& tensor, DType dtype) {
  TensorPtr out = Tensor::empty(tensor.sizes(), dtype);
  for (std::int64_t i = 0; i < tensor.numel(); ++i) {
    out->data<std::uint8_t>()[i] = encode(format_of(dtype), tensor.data<float>()[i]);
  }
  return out;
}

// One scale for the whole matrix, or one for each of `count` rows or columns, as a row-major float tensor.
TensorPtr scale_values(const char* op, const char* name, const Tensor& scale, bool rowwise, DimSpan sizes) {
  check(scale.dtype() == DType::kFloat32, op, ": argument '", name, "' must be float32, got ",
        dtype_name(scale.dtype()));
  check(rowwise ? to_string(scale.sizes()) == to_string(sizes) : scale.numel() == 1, op, ": argument '", name,
        "' must hold one value, or both scales must be [m, 1] and [1, n]; got shape ", to_string(scale.sizes()));
  return contiguous(scale);
}

TensorPtr scaled_mm(const char* op, const Tensor& a, const Tensor& b, const Tensor& scale_a, const Tensor& scale_b,
                    const Tensor* bias, const Tensor* scale_result, DType out_dtype) {
  check_rank(op, "self", a, 2);
  check_rank(op, "mat2", b, 2);
  if (!is_float8(a.dtype()) || !is_float8(b.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": operands must be float8_e4m3fn or float8_e5m2, got ",
                dtype_name(a.dtype()), " and ", dtype_name(b.dtype()));
  }
  check(a.size(1) == b.size(0), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
        to_string(b.sizes()));
  if (!is_float8(out_dtype) && (!is_floating(out_dtype) || out_dtype == DType::kFloat64)) {
    throw_error(ErrorKind::kUnsupported, op, ": out_dtype must be float8, bfloat16, float16 or float32, got ",
                dtype_name(out_dtype));
  }
  const std::int64_t m = a.size(0), n = b.size(1);
  const bool rowwise = scale_a.numel() != 1 || scale_b.numel() != 1;
  const TensorPtr left_scale = scale_values(op, "scale_a", scale_a, rowwise, Dims{m, 1});
  const TensorPtr right_scale = scale_values(op, "scale_b", scale_b, rowwise, Dims{1, n});
  TensorPtr result = Tensor::empty(Dims{m, n}, DType::kFloat32);
  const TensorPtr left = widen(a), right = widen(b);
  multiply(op, DType::kFloat32, matrix_of(*left), matrix_of(*right), matrix_of(*result), 0.0, 1.0);
  TensorPtr added;
  if (bias != nullptr) {
    check(bias->dim() == 1 && bias->size(0) == n, op, ": argument 'bias' must have shape [", n, "], got ",
          to_string(bias->sizes()));
    added = contiguous(*to_dtype(*bias, DType::kFloat32));
  }
  float divisor = 1.0f;  // only a float8 result is rescaled
  if (scale_result != nullptr && is_float8(out_dtype)) {
    divisor = scale_values(op, "scale_result", *scale_result, false, {})->data<float>()[0];
  }
  float* value = result->data<float>();
  for (std::int64_t i = 0; i < m; ++i) {
    const float row = left_scale->data<float>()[rowwise ? i : 0];
    for (std::int64_t j = 0; j < n; ++j, ++value) {
      *value *= row * right_scale->data<float>()[rowwise ? j : 0];
      if (added) *value += added->data<float>()[j];
      *value /= divisor;
    }
  }
  return is_float8(out_dtype) ? narrow(*result, out_dtype) : to_dtype(*result, out_dtype);
}

template <class A>
void int_product(const Tensor& a, const Tensor& b, const Tensor& out) {
  const A* x = a.data<A>();
  const auto* y = b.data<std::int8_t>();
  auto* z = out.data<std::int32_t>();
  const std::int64_t m = a.size(0), n = b.size(1), k = a.size(1);
  const std::int64_t xr = a.stride(0), xc = a.stride(1), yr = b.stride(0), yc = b.stride(1), zr = out.stride(0),
                     zc = out.stride(1);
#pragma omp parallel for if (m * n * k > 32768)
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      std::uint32_t sum = 0;  // wraps around
      if (xc == 1 && yr == 1) {
        for (std::int64_t c = 0; c < k; ++c) {
          sum += static_cast<std::uint32_t>(std::int32_t{x[i * xr + c]} * std::int32_t{y[j * yc + c]});
        }
      } else {
        for (std::int64_t c = 0; c < k; ++c) {
          sum += static_cast<std::uint32_t>(std::int32_t{x[i * xr + c * xc]} * std::int32_t{y[c * yr + j * yc]});
        }
      }
      z[i * zr + j * zc] = static_cast<std::int32_t>(sum);
    }
  }
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu__int_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) {
  constexpr const char* op = "_int_mm";
  return guarded(op, [&] {
    const Tensor& a = cpu_input(self, op, "self");
    const Tensor& b = cpu_input(mat2, op, "mat2");
    const Tensor& c = cpu_input(out, op, "out");
    check_rank(op, "self", a, 2);
    check_rank(op, "mat2", b, 2);
    check(a.dtype() == DType::kInt8 || a.dtype() == DType::kUInt8, op, ": argument 'self' must be int8 or uint8, got ",
          dtype_name(a.dtype()));
    check(b.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(b.dtype()));
    check(a.size(1) == b.size(0), op, ": the inner sizes differ: 'self' is ", to_string(a.sizes()), ", 'mat2' is ",
          to_string(b.sizes()));
    check_out(op, c, DType::kInt32, Dims{a.size(0), b.size(1)});
    if (a.dtype() == DType::kInt8) {
      int_product<std::int8_t>(a, b, c);
    } else {
      int_product<std::uint8_t>(a, b, c);
    }
  });
}

// x [m, k] · int8 weight [n, k]ᵀ, each column times its scale [n].
UNTORCH_SHIM aoti_torch_cpu__weight_int8pack_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scales,
                                                AtenTensorHandle* ret0) {
  constexpr const char* op = "_weight_int8pack_mm";
  return guarded(op, [&] {
    const Tensor& x = cpu_input(self, op, "self");
    const Tensor& weight = cpu_input(mat2, op, "mat2");
    const Tensor& scale = cpu_input(scales, op, "scales");
    check_rank(op, "self", x, 2);
    check_rank(op, "mat2", weight, 2);
    check(is_floating(x.dtype()) && x.dtype() != DType::kFloat64, op,
          ": argument 'self' must be float32, bfloat16 or float16, got ", dtype_name(x.dtype()));
    check(weight.dtype() == DType::kInt8, op, ": argument 'mat2' must be int8, got ", dtype_name(weight.dtype()));
    check(weight.size(1) == x.size(1), op, ": the inner sizes differ: 'self' is ", to_string(x.sizes()), ", 'mat2' is ",
          to_string(weight.sizes()), " (rows are output features)");
    check(scale.dim() == 1 && scale.size(0) == weight.size(0) && scale.dtype() == x.dtype(), op,
          ": argument 'scales' must be ", dtype_name(x.dtype()), " of shape [", weight.size(0), "], got ",
          dtype_name(scale.dtype()), " of shape ", to_string(scale.sizes()));
    const TensorPtr wide = to_dtype(x, DType::kFloat32), values = to_dtype(weight, DType::kFloat32);
    const TensorPtr factors = contiguous(*to_dtype(scale, DType::kFloat32));
    const std::int64_t m = x.size(0), n = weight.size(0);
    const TensorPtr out = Tensor::empty(Dims{m, n}, DType::kFloat32);
    MatrixView right = matrix_of(*values);
    std::swap(right.rows, right.cols);
    std::swap(right.row_stride, right.col_stride);
    multiply(op, DType::kFloat32, matrix_of(*wide), right, matrix_of(*out), 0.0, 1.0);
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) out->data<float>()[i * n + j] *= factors->data<float>()[j];
    }
    give(ret0, to_dtype(*out, x.dtype()), op);
  });
}

UNTORCH_SHIM aoti_torch_cpu__scaled_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                                       AtenTensorHandle scale_b, AtenTensorHandle* bias, AtenTensorHandle* scale_result,
                                       std::int32_t* out_dtype, std::int32_t use_fast_accum, AtenTensorHandle* ret0) {
  constexpr const char* op = "_scaled_mm";
  (void)use_fast_accum;  // a hint for tensor cores
  return guarded(op, [&] {
    const Tensor& a = cpu_input(self, op, "self");
    give(ret0,
         scaled_mm(op, a, cpu_input(mat2, op, "mat2"), cpu_input(scale_a, op, "scale_a"),
                   cpu_input(scale_b, op, "scale_b"), optional_cpu_input(bias, op, "bias"),
                   optional_cpu_input(scale_result, op, "scale_result"), dtype_or(out_dtype, a.dtype())),
         op);
  });
}

UNTORCH_SHIM aoti_torch_cpu__scaled_mm_out(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2,
                                           AtenTensorHandle scale_a, AtenTensorHandle scale_b, AtenTensorHandle* bias,
                                           AtenTensorHandle* scale_result, std::int32_t* out_dtype,
                                           std::int32_t use_fast_accum) {
  constexpr const char* op = "_scaled_mm";
  (void)use_fast_accum;
  return guarded(op, [&] {
    const Tensor& a = cpu_input(self, op, "self");
    const Tensor& c = cpu_input(out, op, "out");
    const TensorPtr result =
        scaled_mm(op, a, cpu_input(mat2, op, "mat2"), cpu_input(scale_a, op, "scale_a"),
                  cpu_input(scale_b, op, "scale_b"), optional_cpu_input(bias, op, "bias"),
                  optional_cpu_input(scale_result, op, "scale_result"), dtype_or(out_dtype, c.dtype()));
    check_out(op, c, result->dtype(), result->sizes());
    copy_cpu(c, *result);
  });
}

// Names that torch no longer generates. bias and scale_result may be null; ret1, once the largest magnitude of the
// result, is left as it is, as by PyTorch.
UNTORCH_SHIM aoti_torch__scaled_mm_v2(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle scale_a,
                                      AtenTensorHandle scale_b, AtenTensorHandle bias, AtenTensorHandle scale_result,
                                      std::int32_t* out_dtype, std::int8_t use_fast_accum, AtenTensorHandle* ret0) {
  return aoti_torch_cpu__scaled_mm(self, mat2, scale_a, scale_b, &bias, &scale_result, out_dtype, use_fast_accum, ret0);
}

UNTORCH_SHIM aoti_torch__scaled_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle bias,
                                   std::int32_t* out_dtype, AtenTensorHandle scale_a, AtenTensorHandle scale_b,
                                   AtenTensorHandle scale_result, std::int8_t use_fast_accum, AtenTensorHandle* ret0,
                                   AtenTensorHandle* ret1) {
  (void)ret1;
  return aoti_torch_cpu__scaled_mm(self, mat2, scale_a, scale_b, &bias, &scale_result, out_dtype, use_fast_accum, ret0);
}

}  // namespace untorch::shims
