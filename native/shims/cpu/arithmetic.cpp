// Element-wise leftovers: abs, angle, add, subtract, mul, pow, gcd, polar, amax, and simple factories.
#include <algorithm>
#include <cmath>
#include <numbers>
#include <numeric>

#include "shims/cpu/elementwise.h"
#include "shims/device_ops.h"
#include "shims/reduce_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// value as T, in T's arithmetic (float for the half types).
template <class T>
auto widen(double value) {
  if constexpr (kIsComplex<T>) {
    return T(static_cast<typename T::value_type>(value));
  } else {
    return static_cast<compute_t<T>>(value);
  }
}

// self + alpha · other in the given dtype.
TensorPtr add(const Tensor& a, const Tensor& b, double alpha, DType dtype, const char* op) {
  check_alpha(dtype, alpha, op);
  TensorPtr out = binary_result(a, b, dtype, op);
  const TensorPtr ca = a.dtype() == dtype ? std::make_unique<Tensor>(a) : to_dtype(a, dtype);
  const TensorPtr cb = b.dtype() == dtype ? std::make_unique<Tensor>(b) : to_dtype(b, dtype);
  dispatch_number(op, dtype, [&]<class T>() {
    const auto factor = widen<T>(alpha);
    map_binary<T, T, T>(*out, *ca, *cb, [factor](T x, T y) {
      if constexpr (std::is_same_v<T, bool>) {
        return x || (factor && y);
      } else {
        return static_cast<T>(x + factor * y);
      }
    });
  });
  return out;
}

TensorPtr multiply(const Tensor& a, const Tensor& b, DType dtype) {
  TensorPtr out = binary_result(a, b, dtype, "mul");
  const TensorPtr ca = a.dtype() == dtype ? std::make_unique<Tensor>(a) : to_dtype(a, dtype);
  const TensorPtr cb = b.dtype() == dtype ? std::make_unique<Tensor>(b) : to_dtype(b, dtype);
  dispatch_number("mul", dtype, [&]<class T>() {
    map_binary<T, T, T>(*out, *ca, *cb, [](T x, T y) {
      if constexpr (std::is_same_v<T, bool>) {
        return x && y;
      } else {
        return static_cast<T>(x * y);
      }
    });
  });
  return out;
}

// Integer powers wrap around; a negative exponent gives 0 except for the bases 1 and -1.
template <class T>
T integer_power(T base, T exponent) {
  if constexpr (std::is_signed_v<T>) {
    if (exponent < 0) return base == 1 ? T(1) : base == -1 ? (exponent % 2 == 0 ? T(1) : T(-1)) : T(0);
  }
  using U = std::make_unsigned_t<T>;
  std::uint64_t result = 1, factor = static_cast<U>(base), rest = static_cast<U>(exponent);
  for (; rest != 0; rest >>= 1) {
    if ((rest & 1) != 0) result *= factor;
    factor *= factor;
  }
  return static_cast<T>(result);
}

TensorPtr power(const Tensor& a, const Tensor& b, DType dtype) {
  if (dtype == DType::kBool) throw_error(ErrorKind::kUnsupported, "pow: dtype bool is not supported");
  TensorPtr out = binary_result(a, b, dtype, "pow");
  const TensorPtr ca = a.dtype() == dtype ? std::make_unique<Tensor>(a) : to_dtype(a, dtype);
  const TensorPtr cb = b.dtype() == dtype ? std::make_unique<Tensor>(b) : to_dtype(b, dtype);
  dispatch_number("pow", dtype, [&]<class T>() {
    if constexpr (!std::is_same_v<T, bool>) {
      map_binary<T, T, T>(*out, *ca, *cb, [](T x, T y) {
        if constexpr (std::is_integral_v<T>) {
          return integer_power(x, y);
        } else if constexpr (kIsComplex<T>) {
          return std::pow(x, y);
        } else {
          return static_cast<T>(std::pow(static_cast<compute_t<T>>(x), static_cast<compute_t<T>>(y)));
        }
      });
    }
  });
  return out;
}

void add_shim(AtenTensorHandle self, AtenTensorHandle other, double alpha, AtenTensorHandle* ret0, const char* op,
              bool subtract) {
  const Tensor& a = cpu_input(self, op, "self");
  const Tensor& b = cpu_input(other, op, "other");
  const DType dtype = result_type(a, b);
  check(!subtract || (a.dtype() != DType::kBool && b.dtype() != DType::kBool), op,
        ": subtraction of bool tensors is not supported; use logical_xor or logical_not");
  give(ret0, add(a, b, subtract ? -alpha : alpha, dtype, op), op);
}

void amax(const Tensor& t, DimSpan dims, bool keepdim, AtenTensorHandle* ret0) {
  std::vector<bool> reduced(t.sizes().size(), dims.empty());
  for (const std::int64_t dim : dims) {
    const auto d = static_cast<std::size_t>(normalize_dim(dim, t.dim(), "amax"));
    if (reduced.empty()) continue;
    check(!reduced[d], "amax: dimension ", d, " appears twice in ", to_string(dims));
    reduced[d] = true;
  }
  std::vector<std::int64_t> kept, final_shape;
  for (std::size_t d = 0; d < reduced.size(); ++d) {
    check(!reduced[d] || t.sizes()[d] != 0, "amax: dimension ", d, " of shape ", to_string(t.sizes()),
          " is empty and has no maximum");
    kept.push_back(reduced[d] ? 1 : t.sizes()[d]);
    if (!reduced[d] || keepdim) final_shape.push_back(kept.back());
  }
  TensorPtr out = Tensor::empty(kept, t.dtype());
  const Tensor wide = expand(*out, t.sizes(), "amax", "out");
  dispatch_real("amax", t.dtype(), [&]<class T>() {
    T* to = out->data<T>();
    const T* from = t.data<T>();
    std::fill_n(to, out->numel(), reduce_start<T>(Reduce::kAMax));
    const kernels::StridedLoop<2> loop(t.sizes(), {DimSpan(wide.strides()), DimSpan(t.strides())}, true);
    const auto step = loop.inner();
    // One thread: several elements meet in one place.
    loop.run_serial([&](const std::array<std::int64_t, 2>& at, std::int64_t n) {
      for (std::int64_t i = 0; i < n; ++i) {
        T& best = to[at[0] + i * step[0]];
        best = combine(Reduce::kAMax, best, from[at[1] + i * step[1]]);
      }
    });
  });
  give(ret0, out->view(final_shape, contiguous_strides(final_shape), 0), "amax");
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_abs(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("abs", [&] {
    const Tensor& t = cpu_input(self, "abs", "self");
    if (t.dtype() == DType::kBool) throw_error(ErrorKind::kUnsupported, "abs: dtype bool is not supported");
    const DType dtype = t.dtype() == DType::kComplex64    ? DType::kFloat32
                        : t.dtype() == DType::kComplex128 ? DType::kFloat64
                                                          : t.dtype();
    TensorPtr out = empty_like(t, dtype);
    dispatch_number("abs", t.dtype(), [&]<class T>() {
      if constexpr (kIsComplex<T>) {
        map_unary<typename T::value_type, T>(*out, t, [](T x) { return std::abs(x); });
      } else if constexpr (std::is_unsigned_v<T>) {
        copy_cpu(*out, t);
      } else if constexpr (std::is_integral_v<T>) {
        // The lowest value has no positive twin and stays, as in PyTorch.
        map_unary<T, T>(*out, t,
                        [](T x) { return x < 0 ? static_cast<T>(-static_cast<std::make_unsigned_t<T>>(x)) : x; });
      } else {
        map_unary<T, T>(*out, t, [](T x) { return static_cast<T>(std::fabs(static_cast<compute_t<T>>(x))); });
      }
    });
    give(ret0, std::move(out), "abs");
  });
}

UNTORCH_SHIM aoti_torch_cpu_angle(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("angle", [&] {
    const Tensor& t = cpu_input(self, "angle", "self");
    const DType dtype = t.dtype() == DType::kComplex64    ? DType::kFloat32
                        : t.dtype() == DType::kComplex128 ? DType::kFloat64
                                                          : result_type_with_double(t);
    TensorPtr out = empty_like(t, dtype);
    dispatch_number("angle", t.dtype(), [&]<class T>() {
      if constexpr (kIsComplex<T>) {
        map_unary<typename T::value_type, T>(*out, t, [](T x) { return std::arg(x); });
      } else if constexpr (std::is_integral_v<T>) {
        map_unary<float, T>(*out, t, [](T x) { return x < T(0) ? std::numbers::pi_v<float> : 0.0f; });
      } else {
        using Wide = compute_t<T>;
        map_unary<T, T>(*out, t, [](T x) {
          const Wide wide = static_cast<Wide>(x);
          return std::isnan(wide) ? x : static_cast<T>(wide < 0 ? std::numbers::pi_v<Wide> : Wide(0));
        });
      }
    });
    give(ret0, std::move(out), "angle");
  });
}

UNTORCH_SHIM aoti_torch_cpu_add_Tensor(AtenTensorHandle self, AtenTensorHandle other, double alpha,
                                       AtenTensorHandle* ret0) {
  return guarded("add", [&] { add_shim(self, other, alpha, ret0, "add", false); });
}

UNTORCH_SHIM aoti_torch_aten_subtract_Tensor(AtenTensorHandle self, AtenTensorHandle other, double alpha,
                                             AtenTensorHandle* ret0) {
  if (on_cuda(self) && cuda_ops.subtract != nullptr) return cuda_ops.subtract(self, other, alpha, ret0);
  return guarded("subtract", [&] { add_shim(self, other, alpha, ret0, "subtract", true); });
}

// The scalar arrives as a double, so an integer tensor gives a floating one, as with a Python float.
UNTORCH_SHIM aoti_torch_cpu_add_Scalar(AtenTensorHandle self, double other, double alpha, AtenTensorHandle* ret0) {
  return guarded("add", [&] {
    const Tensor& t = cpu_input(self, "add", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, add(t, *scalar_tensor(other, dtype), alpha, dtype, "add"), "add");
  });
}

UNTORCH_SHIM aoti_torch_cpu_mul_Tensor(AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0) {
  return guarded("mul", [&] {
    const Tensor& a = cpu_input(self, "mul", "self");
    const Tensor& b = cpu_input(other, "mul", "other");
    give(ret0, multiply(a, b, result_type(a, b)), "mul");
  });
}

UNTORCH_SHIM aoti_torch_cpu_mul_Scalar(AtenTensorHandle self, double other, AtenTensorHandle* ret0) {
  return guarded("mul", [&] {
    const Tensor& t = cpu_input(self, "mul", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, multiply(t, *scalar_tensor(other, dtype), dtype), "mul");
  });
}

UNTORCH_SHIM aoti_torch_cpu_pow_Tensor_Tensor(AtenTensorHandle self, AtenTensorHandle exponent,
                                              AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& a = cpu_input(self, "pow", "self");
    const Tensor& b = cpu_input(exponent, "pow", "exponent");
    give(ret0, power(a, b, result_type(a, b)), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cpu_pow_Tensor_Scalar(AtenTensorHandle self, double exponent, AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& t = cpu_input(self, "pow", "self");
    const DType dtype = result_type_with_double(t);
    give(ret0, power(t, *scalar_tensor(exponent, dtype), dtype), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cpu_pow_Scalar(double self, AtenTensorHandle exponent, AtenTensorHandle* ret0) {
  return guarded("pow", [&] {
    const Tensor& t = cpu_input(exponent, "pow", "exponent");
    const DType dtype = result_type_with_double(t);
    give(ret0, power(*scalar_tensor(self, dtype), t, dtype), "pow");
  });
}

UNTORCH_SHIM aoti_torch_cpu_gcd(AtenTensorHandle self, AtenTensorHandle other, AtenTensorHandle* ret0) {
  return guarded("gcd", [&] {
    const Tensor& a = cpu_input(self, "gcd", "self");
    const Tensor& b = cpu_input(other, "gcd", "other");
    const DType dtype = result_type(a, b);
    if (!is_integral(dtype)) {
      throw_error(ErrorKind::kUnsupported, "gcd: dtype ", dtype_name(dtype),
                  " is not supported, expected an integer type");
    }
    TensorPtr out = binary_result(a, b, dtype, "gcd");
    const TensorPtr ca = a.dtype() == dtype ? std::make_unique<Tensor>(a) : to_dtype(a, dtype);
    const TensorPtr cb = b.dtype() == dtype ? std::make_unique<Tensor>(b) : to_dtype(b, dtype);
    dispatch_real("gcd", dtype, [&]<class T>() {
      if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
        map_binary<T, T, T>(*out, *ca, *cb, [](T x, T y) {
          using U = std::make_unsigned_t<T>;
          const U ux = x < T(0) ? static_cast<U>(U(0) - static_cast<U>(x)) : static_cast<U>(x);
          const U uy = y < T(0) ? static_cast<U>(U(0) - static_cast<U>(y)) : static_cast<U>(y);
          return static_cast<T>(std::gcd(ux, uy));
        });
      }
    });
    give(ret0, std::move(out), "gcd");
  });
}

UNTORCH_SHIM aoti_torch_cpu_polar(AtenTensorHandle abs, AtenTensorHandle angle, AtenTensorHandle* ret0) {
  return guarded("polar", [&] {
    const Tensor& a = cpu_input(abs, "polar", "abs");
    const Tensor& b = cpu_input(angle, "polar", "angle");
    check(a.dtype() == b.dtype() && (a.dtype() == DType::kFloat32 || a.dtype() == DType::kFloat64),
          "polar: 'abs' and 'angle' must both be float32 or float64, got ", dtype_name(a.dtype()), " and ",
          dtype_name(b.dtype()));
    auto run = [&]<class T>(DType dtype) {
      TensorPtr out = binary_result(a, b, dtype, "polar");
      map_binary<std::complex<T>, T, T>(
          *out, a, b, [](T r, T phi) { return std::complex<T>(r * std::cos(phi), r * std::sin(phi)); });
      give(ret0, std::move(out), "polar");
    };
    a.dtype() == DType::kFloat32 ? run.template operator()<float>(DType::kComplex64)
                                 : run.template operator()<double>(DType::kComplex128);
  });
}

UNTORCH_SHIM aoti_torch_aten_amax(AtenTensorHandle self, const std::int64_t* dim, std::int64_t dim_len_,
                                  std::int32_t keepdim, AtenTensorHandle* ret0) {
  return guarded("amax", [&] { amax(cpu_input(self, "amax", "self"), ints(dim, dim_len_), keepdim != 0, ret0); });
}
