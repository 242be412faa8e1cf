// cumsum, cumprod, cummax, cummin and logcumsumexp.
#include "kernels/scan.h"

#include "shims/device_work.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::ExtremumParams;
using kernels::ScanParams;

namespace {

enum class Scan { kSum, kProduct, kLogSumExp };

bool is_number(DType dtype) {
  return is_integral(dtype) || is_floating(dtype) || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

void scan(const Op& op, Scan what, const Tensor& t, std::int64_t dim, DType dtype, AtenTensorHandle* ret0) {
  TensorPtr out = Tensor::empty(t.sizes(), dtype, t.device());
  if (t.numel() != 0) {
    // CUDA's kernels widen integers as they read them.
    const bool widens = op.on_cuda() && is_integral(dtype) && (is_integral(t.dtype()) || t.dtype() == DType::kBool);
    const TensorPtr in = t.dtype() == dtype || widens ? std::make_unique<Tensor>(t) : to_dtype(t, dtype);
    ScanParams params;
    params.lanes = lanes<2>(op, dim, {out.get(), in.get()});
    params.out = out->raw();
    params.input = in->raw();
    params.out_dtype = dtype;
    params.in_dtype = in->dtype();
    run(
        op, {&t},
        [&] {
          what == Scan::kSum       ? kernels::cpu::cumsum(params)
          : what == Scan::kProduct ? kernels::cpu::cumprod(params)
                                   : kernels::cpu::logcumsumexp(params);
        },
        [&](const auto& on) {
          const std::size_t bytes = kernels::cuda::scan_scratch(params.lanes.rows.numel, params.lanes.n);
          with_scratch(on, bytes, [&](void* scratch) {
            return what == Scan::kSum       ? kernels::cuda::cumsum(params, scratch, on.stream())
                   : what == Scan::kProduct ? kernels::cuda::cumprod(params, scratch, on.stream())
                                            : kernels::cuda::logcumsumexp(params, scratch, on.stream());
          });
        });
  }
  give(ret0, std::move(out), op);
}

void cumulative(const Op& op, Scan what, AtenTensorHandle self, std::int64_t dim_arg, const std::int32_t* dtype_arg,
                AtenTensorHandle* ret0) {
  const Tensor& t = op.input(self, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  // Without a dtype integers and bool are summed as int64.
  const bool counts = is_integral(t.dtype()) || t.dtype() == DType::kBool;
  const DType dtype = dtype_or(dtype_arg, counts ? DType::kInt64 : t.dtype());
  // The CPU converts whatever there is to a dtype that was asked for.
  if (t.dtype() != DType::kBool && !is_number(t.dtype()) && (op.on_cuda() || dtype == t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
  }
  if (!is_number(dtype)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported for the result");
  }
  scan(op, what, t, dim, dtype, ret0);
}

void extremum(const Op& op, AtenTensorHandle self, std::int64_t dim_arg, bool largest, AtenTensorHandle* ret0,
              AtenTensorHandle* ret1) {
  const Tensor& t = op.input(self, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  check_ordered(op, t);
  TensorPtr values = Tensor::empty(t.sizes(), t.dtype(), t.device()),
            indices = Tensor::empty(t.sizes(), DType::kInt64, t.device());
  if (t.numel() != 0) {
    ExtremumParams params;
    params.lanes = lanes<3>(op, dim, {values.get(), indices.get(), &t});
    params.values = values->raw();
    params.indices = indices->data<std::int64_t>();
    params.input = t.raw();
    params.dtype = t.dtype();
    params.largest = largest;
    run(
        op, {&t}, [&] { kernels::cpu::cumulative_extremum(params); },
        [&](const auto& on) {
          const std::size_t bytes = kernels::cuda::scan_scratch(params.lanes.rows.numel, params.lanes.n);
          with_scratch(on, bytes,
                       [&](void* scratch) { return kernels::cuda::cumulative_extremum(params, scratch, on.stream()); });
        });
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_OP(cumsum, (AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype, AtenTensorHandle* ret0), self, dim,
           dtype, ret0) {
  cumulative(op, Scan::kSum, self, dim, dtype, ret0);
}

UNTORCH_OP(cumprod, (AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype, AtenTensorHandle* ret0), self, dim,
           dtype, ret0) {
  cumulative(op, Scan::kProduct, self, dim, dtype, ret0);
}

UNTORCH_OP(cummax, (AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0, AtenTensorHandle* ret1), self, dim,
           ret0, ret1) {
  extremum(op, self, dim, true, ret0, ret1);
}

UNTORCH_OP(cummin, (AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0, AtenTensorHandle* ret1), self, dim,
           ret0, ret1) {
  extremum(op, self, dim, false, ret0, ret1);
}

UNTORCH_OP(logcumsumexp, (AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle* ret0), self, dim_arg, ret0) {
  const Tensor& t = op.input(self, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  if (!is_floating(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, "logcumsumexp: dtype ", dtype_name(t.dtype()),
                " is not supported, expected a floating type");
  }
  scan(op, Scan::kLogSumExp, t, dim, t.dtype(), ret0);
}
