// cumsum, cumprod, cummax, cummin and logcumsumexp (aoti_torch_cpu_*).
#include "kernels/cpu/scan/scan.h"

#include <complex>

#include "shims/cpu/elementwise.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// The result's dtype: the one asked for, else int64 for integers and bool, else the input's.
DType scan_dtype(const Tensor& t, const std::int32_t* dtype) {
  const bool counts = is_integral(t.dtype()) || t.dtype() == DType::kBool;
  return dtype_or(dtype, counts ? DType::kInt64 : t.dtype());
}

template <class T>
void complex_scan(const Tensor& out, const Tensor& in, std::int64_t dim, bool product) {
  const std::int64_t n = lane_size(in, dim), so = lane_stride(out, dim), si = lane_stride(in, dim);
  auto* to = out.data<std::complex<T>>();
  const auto* from = in.data<std::complex<T>>();
  for_each_lane<2>({&out, &in}, dim, in.sizes(), n, [&](const std::array<std::int64_t, 2>& at) {
    std::complex<double> running = product ? 1.0 : 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
      const std::complex<double> value(from[at[1] + i * si]);
      running = product ? running * value : running + value;
      to[at[0] + i * so] = std::complex<T>(running);
    }
  });
}

void cumulative(AtenTensorHandle self, std::int64_t dim_arg, const std::int32_t* dtype_arg, AtenTensorHandle* ret0,
                bool product, const char* op) {
  const Tensor& t = cpu_input(self, op, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  const DType dtype = scan_dtype(t, dtype_arg);
  if (dtype == DType::kBool) throw_error(ErrorKind::kUnsupported, op, ": dtype bool is not supported for the result");
  const Tensor in = t.dtype() == dtype ? t : *to_dtype(t, dtype);
  TensorPtr out = Tensor::empty(t.sizes(), dtype);
  if (dtype == DType::kComplex64) {
    complex_scan<float>(*out, in, dim, product);
  } else if (dtype == DType::kComplex128) {
    complex_scan<double>(*out, in, dim, product);
  } else {
    const std::int64_t n = lane_size(in, dim), so = lane_stride(*out, dim), si = lane_stride(in, dim);
    dispatch_real(op, dtype, [&]<class T>() {
      if constexpr (!std::is_same_v<T, bool>) {
        T* to = out->data<T>();
        const T* from = in.data<T>();
        for_each_lane<2>({out.get(), &in}, dim, in.sizes(), n, [&](const std::array<std::int64_t, 2>& at) {
          product ? kernels::cumprod_lane(to + at[0], so, from + at[1], si, n)
                  : kernels::cumsum_lane(to + at[0], so, from + at[1], si, n);
        });
      }
    });
  }
  give(ret0, std::move(out), op);
}

template <bool kMax>
void extremum(AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
              const char* op) {
  const Tensor& t = cpu_input(self, op, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op), n = lane_size(t, dim);
  TensorPtr values = Tensor::empty(t.sizes(), t.dtype()), indices = Tensor::empty(t.sizes(), DType::kInt64);
  const std::int64_t sv = lane_stride(*values, dim), si = lane_stride(*indices, dim), st = lane_stride(t, dim);
  dispatch_real(op, t.dtype(), [&]<class T>() {
    for_each_lane<3>({values.get(), indices.get(), &t}, dim, t.sizes(), n, [&](const std::array<std::int64_t, 3>& at) {
      kernels::cumulative_extremum_lane<kMax>(values->data<T>() + at[0], sv, indices->data<std::int64_t>() + at[1], si,
                                              t.data<T>() + at[2], st, n);
    });
  });
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cpu_cumsum(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
                                   AtenTensorHandle* ret0) {
  return guarded("cumsum", [&] { cumulative(self, dim, dtype, ret0, false, "cumsum"); });
}

UNTORCH_SHIM aoti_torch_cpu_cumprod(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
                                    AtenTensorHandle* ret0) {
  return guarded("cumprod", [&] { cumulative(self, dim, dtype, ret0, true, "cumprod"); });
}

UNTORCH_SHIM aoti_torch_cpu_cummax(AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0,
                                   AtenTensorHandle* ret1) {
  return guarded("cummax", [&] { extremum<true>(self, dim, ret0, ret1, "cummax"); });
}

UNTORCH_SHIM aoti_torch_cpu_cummin(AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0,
                                   AtenTensorHandle* ret1) {
  return guarded("cummin", [&] { extremum<false>(self, dim, ret0, ret1, "cummin"); });
}

UNTORCH_SHIM aoti_torch_cpu_logcumsumexp(AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle* ret0) {
  return guarded("logcumsumexp", [&] {
    const Tensor& t = cpu_input(self, "logcumsumexp", "self");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "logcumsumexp"), n = lane_size(t, dim);
    TensorPtr out = Tensor::empty(t.sizes(), t.dtype());
    const std::int64_t so = lane_stride(*out, dim), si = lane_stride(t, dim);
    dispatch_floating("logcumsumexp", t.dtype(), [&]<class T>() {
      for_each_lane<2>({out.get(), &t}, dim, t.sizes(), n * 16, [&](const std::array<std::int64_t, 2>& at) {
        kernels::logcumsumexp_lane(out->data<T>() + at[0], so, t.data<T>() + at[1], si, n);
      });
    });
    give(ret0, std::move(out), "logcumsumexp");
  });
}
