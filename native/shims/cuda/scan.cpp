// cumsum, cumprod, cummax, cummin and logcumsumexp (aoti_torch_cuda_*).
#include "kernels/cuda/scan/scan.h"

#include "shims/cuda/lanes.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

StorageRef scan_scratch(const OnDevice& on, std::int64_t rows, std::int64_t n) {
  const std::size_t bytes = kernels::cuda::scan_scratch(rows, n);
  return bytes == 0 ? StorageRef() : on.scratch(bytes);
}

void* address(const StorageRef& scratch) { return scratch ? scratch->data() : nullptr; }

bool is_number(DType dtype) {
  return is_integral(dtype) || is_floating(dtype) || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

// Without a dtype integers and bool are summed as int64.
DType scan_dtype(const Tensor& t, const std::int32_t* dtype) {
  const bool counts = is_integral(t.dtype()) || t.dtype() == DType::kBool;
  return dtype_or(dtype, counts ? DType::kInt64 : t.dtype());
}

using Launcher = int (*)(const kernels::cuda::ScanJob& job, void* scratch, kernels::cuda::Stream stream);

void scan(const OnDevice& on, const Tensor& t, std::int64_t dim, DType dtype, Launcher launcher, AtenTensorHandle* ret0,
          const char* op) {
  TensorPtr out = Tensor::empty(t.sizes(), dtype, t.device());
  if (t.numel() != 0) {
    // Integers are widened as they are read.
    const bool reads =
        t.dtype() == dtype || (is_integral(dtype) && (is_integral(t.dtype()) || t.dtype() == DType::kBool));
    const TensorPtr in = reads ? std::make_unique<Tensor>(t) : to_dtype(t, dtype);
    kernels::cuda::ScanJob job;
    job.lanes = lanes<2>(op, dim, {out.get(), in.get()});
    job.out = out->raw();
    job.input = in->raw();
    job.out_dtype = out->dtype();
    job.in_dtype = in->dtype();
    const StorageRef scratch = scan_scratch(on, job.lanes.rows.numel, job.lanes.n);
    on.launched(launcher(job, address(scratch), on.stream()));
  }
  give(ret0, std::move(out), op);
}

void cumulative(AtenTensorHandle self, std::int64_t dim_arg, const std::int32_t* dtype_arg, Launcher launcher,
                AtenTensorHandle* ret0, const char* op) {
  const Tensor& t = cuda_input(self, op, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  const DType dtype = scan_dtype(t, dtype_arg);
  if (t.dtype() != DType::kBool && !is_number(t.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
  }
  if (!is_number(dtype)) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(dtype), " is not supported for the result");
  }
  const OnDevice on(op, t);
  scan(on, t, dim, dtype, launcher, ret0, op);
}

void extremum(AtenTensorHandle self, std::int64_t dim_arg, bool largest, AtenTensorHandle* ret0, AtenTensorHandle* ret1,
              const char* op) {
  const Tensor& t = cuda_input(self, op, "self");
  const std::int64_t dim = normalize_dim(dim_arg, t.dim(), op);
  check_ordered(t, op);
  const OnDevice on(op, t);
  TensorPtr values = Tensor::empty(t.sizes(), t.dtype(), t.device()),
            indices = Tensor::empty(t.sizes(), DType::kInt64, t.device());
  if (t.numel() != 0) {
    kernels::cuda::ExtremumJob job;
    job.lanes = lanes<3>(op, dim, {values.get(), indices.get(), &t});
    job.values = values->raw();
    job.indices = indices->data<std::int64_t>();
    job.input = t.raw();
    job.dtype = t.dtype();
    job.largest = largest;
    const StorageRef scratch = scan_scratch(on, job.lanes.rows.numel, job.lanes.n);
    on.launched(kernels::cuda::cumulative_extremum(job, address(scratch), on.stream()));
  }
  give(ret0, std::move(values), op);
  give(ret1, std::move(indices), op);
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_cumsum(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
                                    AtenTensorHandle* ret0) {
  return guarded("cumsum", [&] { cumulative(self, dim, dtype, kernels::cuda::cumsum, ret0, "cumsum"); });
}

UNTORCH_SHIM aoti_torch_cuda_cumprod(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
                                     AtenTensorHandle* ret0) {
  return guarded("cumprod", [&] { cumulative(self, dim, dtype, kernels::cuda::cumprod, ret0, "cumprod"); });
}

UNTORCH_SHIM aoti_torch_cuda_cummax(AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0,
                                    AtenTensorHandle* ret1) {
  return guarded("cummax", [&] { extremum(self, dim, true, ret0, ret1, "cummax"); });
}

UNTORCH_SHIM aoti_torch_cuda_cummin(AtenTensorHandle self, std::int64_t dim, AtenTensorHandle* ret0,
                                    AtenTensorHandle* ret1) {
  return guarded("cummin", [&] { extremum(self, dim, false, ret0, ret1, "cummin"); });
}

UNTORCH_SHIM aoti_torch_cuda_logcumsumexp(AtenTensorHandle self, std::int64_t dim_arg, AtenTensorHandle* ret0) {
  return guarded("logcumsumexp", [&] {
    const Tensor& t = cuda_input(self, "logcumsumexp", "self");
    const std::int64_t dim = normalize_dim(dim_arg, t.dim(), "logcumsumexp");
    if (!is_floating(t.dtype())) {
      throw_error(ErrorKind::kUnsupported, "logcumsumexp: dtype ", dtype_name(t.dtype()),
                  " is not supported, expected a floating type");
    }
    const OnDevice on("logcumsumexp", t);
    scan(on, t, dim, t.dtype(), kernels::cuda::logcumsumexp, ret0, "logcumsumexp");
  });
}
