// nonzero, nonzero_static, masked_select and repeat_interleave (aoti_torch_cuda_*).
#include "kernels/cuda/scan/compact.h"

#include "kernels/cuda/scan/scan.h"
#include "shims/cuda/lanes.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::CompactJob;

namespace {

// Elements of `flags` (seen as `shape`) that are not zero, and what lies there in `values`.
CompactJob compact_job(const char* op, DimSpan shape, const Tensor& flags, const Tensor& values) {
  // Only its strides count: they fix the order.
  const Tensor order({}, 0, DType::kInt64, shape, contiguous_strides(shape));
  CompactJob job;
  job.space = strided<3>(op, shape, {&order, &flags, &values});
  job.flags = flags.raw();
  job.flag_dtype = flags.dtype();
  return job;
}

TensorPtr count(const OnDevice& on, const CompactJob& job) {
  const std::int64_t entries = kernels::cuda::compact_entries(job.space.numel);
  TensorPtr starts = Tensor::empty(DimSpan(&entries, 1), DType::kInt64, on.device());
  on.launched(kernels::cuda::compact_count(job, starts->data<std::int64_t>(), on.stream()));
  return starts;
}

const std::int64_t* last_of(const Tensor& starts) { return starts.data<std::int64_t>() + starts.numel() - 1; }

std::int64_t counted(const OnDevice& on, const Tensor& starts, const char* op) {
  std::int64_t total = 0;
  read_back(on, op, last_of(starts), &total, 1);
  return total;
}

void check_flags(const Tensor& t, const char* op) {
  const bool known = t.dtype() == DType::kBool || is_integral(t.dtype()) || is_floating(t.dtype()) ||
                     t.dtype() == DType::kComplex64 || t.dtype() == DType::kComplex128 ||
                     t.dtype() == DType::kFloat8E4M3FN || t.dtype() == DType::kFloat8E5M2;
  if (!known) throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()), " is not supported");
}

// PyTorch's layout: each dimension's positions lie together.
TensorPtr coordinates(std::int64_t count, const Tensor& t) {
  const Dims shape{count, t.dim()}, strides{1, std::max<std::int64_t>(count, 1)};
  return Tensor::empty_strided(shape, strides, DType::kInt64, t.device());
}

void write_coordinates(const OnDevice& on, const CompactJob& job, const Tensor& starts, const Tensor& t,
                       const Tensor& out) {
  on.launched(kernels::cuda::compact_coordinates(job, starts.data<std::int64_t>(), static_cast<int>(t.dim()),
                                                 t.sizes().data(), out.data<std::int64_t>(), out.strides()[0],
                                                 out.strides()[1], out.size(0), on.stream()));
}

}  // namespace

UNTORCH_SHIM aoti_torch_cuda_nonzero(AtenTensorHandle self, AtenTensorHandle* ret0) {
  return guarded("nonzero", [&] {
    const char* op = "nonzero";
    const Tensor& t = cuda_input(self, op, "self");
    check_flags(t, op);
    const OnDevice on(op, t);
    refuse_capture(on, op, "the size of the result depends on the data");
    TensorPtr out;
    if (t.numel() == 0) {
      out = coordinates(0, t);
    } else {
      const CompactJob job = compact_job(op, t.sizes(), t, t);
      const TensorPtr starts = count(on, job);
      out = coordinates(counted(on, *starts, op), t);
      if (out->numel() != 0) write_coordinates(on, job, *starts, t, *out);
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_nonzero_static(AtenTensorHandle self, std::int64_t size, std::int64_t fill_value,
                                            AtenTensorHandle* ret0) {
  return guarded("nonzero_static", [&] {
    const char* op = "nonzero_static";
    const Tensor& t = cuda_input(self, op, "self");
    check(size >= 0, "nonzero_static: 'size' is ", size, ", expected 0 or more");
    check_flags(t, op);
    const OnDevice on(op, t);
    TensorPtr out = coordinates(size, t);
    if (out->numel() != 0) {
      // An empty input has a count as well: zero.
      const CompactJob job = compact_job(op, t.sizes(), t, t);
      const TensorPtr starts = count(on, job);
      write_coordinates(on, job, *starts, t, *out);
      on.launched(kernels::cuda::compact_fill_rest(last_of(*starts), static_cast<int>(t.dim()),
                                                   out->data<std::int64_t>(), out->strides()[0], out->strides()[1],
                                                   size, fill_value, on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

UNTORCH_SHIM aoti_torch_cuda_masked_select(AtenTensorHandle self, AtenTensorHandle mask, AtenTensorHandle* ret0) {
  return guarded("masked_select", [&] {
    const char* op = "masked_select";
    const Tensor& t = cuda_input(self, op, "self");
    const Tensor& m = cuda_input(mask, op, "mask");
    check(m.dtype() == DType::kBool || m.dtype() == DType::kUInt8, op, ": 'mask' must be bool, got ",
          dtype_name(m.dtype()));
    const auto shape = broadcast_shapes(t.sizes(), m.sizes(), op);
    const std::size_t bytes = element_size(t.dtype());
    if (bytes == 0) throw_error(ErrorKind::kUnsupported, op, ": ", dtype_name(t.dtype()), " is not supported");
    const OnDevice on(op, t, {&m});
    refuse_capture(on, op, "the size of the result depends on the data");
    std::int64_t total = 0;
    TensorPtr starts;
    CompactJob job;
    if (checked_numel(shape) != 0) {
      job = compact_job(op, shape, m, t);
      starts = count(on, job);
      total = counted(on, *starts, op);
    }
    TensorPtr out = Tensor::empty(DimSpan(&total, 1), t.dtype(), t.device());
    if (total != 0) {
      on.launched(kernels::cuda::compact_values(job, starts->data<std::int64_t>(), out->raw(), t.raw(),
                                                static_cast<int>(bytes), on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}

// With output_size nothing is read back, so counts that do not sum to it are not noticed: positions past their sum get
// the number of rows, as no row holds them.
UNTORCH_SHIM aoti_torch_cuda_repeat_interleave_Tensor(AtenTensorHandle repeats, std::int64_t* output_size,
                                                      AtenTensorHandle* ret0) {
  return guarded("repeat_interleave", [&] {
    const char* op = "repeat_interleave";
    const Tensor& t = cuda_input(repeats, op, "repeats");
    check(t.dim() == 1, op, ": 'repeats' must be 1-D, got ", t.dim(), "-D");
    check(t.dtype() == DType::kInt64 || t.dtype() == DType::kInt32, op, ": 'repeats' is ", dtype_name(t.dtype()),
          ", expected int32 or int64");
    check(output_size == nullptr || *output_size >= 0, op, ": 'output_size' is ",
          output_size == nullptr ? 0 : *output_size, ", expected 0 or more");
    const std::int64_t rows = t.size(0);
    check(rows != 0 || output_size == nullptr || *output_size == 0, op, ": 'output_size' is ",
          output_size == nullptr ? 0 : *output_size, ", but the repeats sum to 0");
    const OnDevice on(op, t);
    if (output_size == nullptr) refuse_capture(on, op, "without 'output_size' its result's size depends on the data");
    std::int64_t total = output_size == nullptr ? 0 : *output_size;
    TensorPtr ends;
    if (rows != 0) {
      // One entry more: a flag for negative counts.
      const std::int64_t entries = rows + 1;
      ends = Tensor::empty(DimSpan(&entries, 1), DType::kInt64, t.device());
      const std::int64_t one = 1;
      const TensorPtr sums = ends->view({&rows, 1}, {&one, 1}, 0);
      kernels::cuda::ScanJob job;
      job.lanes = lanes<2>(op, 0, {sums.get(), &t});
      job.out = sums->raw();
      job.input = t.raw();
      job.out_dtype = DType::kInt64;
      job.in_dtype = t.dtype();
      const std::size_t bytes = kernels::cuda::scan_scratch(1, rows);
      const StorageRef scratch = bytes == 0 ? StorageRef() : on.scratch(bytes);
      on.launched(kernels::cuda::cumsum(job, bytes == 0 ? nullptr : scratch->data(), on.stream()));
      if (output_size == nullptr) {
        std::int64_t* const flag = ends->data<std::int64_t>() + rows;
        cuda::check_driver(
            cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(flag), 0, sizeof *flag, on.stream()), op);
        on.launched(kernels::cuda::find_negative(t.raw(), t.dtype(), rows, t.stride(0), flag, on.stream()));
        std::int64_t seen[2] = {};
        read_back(on, op, flag - 1, seen, 2);
        check(seen[1] == 0, op, ": 'repeats' holds a negative count");
        total = seen[0];
      }
    }
    TensorPtr out = Tensor::empty(DimSpan(&total, 1), t.dtype(), t.device());
    if (total != 0) {
      on.launched(kernels::cuda::expand_rows(ends->data<std::int64_t>(), rows, out->raw(), t.dtype() == DType::kInt32,
                                             total, on.stream()));
    }
    give(ret0, std::move(out), op);
  });
}
