// segment_reduce (aoti_torch_cuda_*).
#include "kernels/cuda/reduce/segment_reduce.h"
#include "kernels/cuda/scan/scan.h"
#include "shims/cuda/lanes.h"
#include "shims/reduce_op.h"

using namespace untorch;
using namespace untorch::shims;
using kernels::cuda::SegmentReduce;

namespace {

SegmentReduce kernel_reduce(Reduce reduce) {
  switch (reduce) {
    case Reduce::kProd:
      return SegmentReduce::kProd;
    case Reduce::kMean:
      return SegmentReduce::kMean;
    case Reduce::kAMax:
      return SegmentReduce::kAMax;
    case Reduce::kAMin:
      return SegmentReduce::kAMin;
    default:
      return SegmentReduce::kSum;
  }
}

// Where the segments end: the running sums of their lengths.
TensorPtr running_sums(const OnDevice& on, const Tensor& lengths, const char* op) {
  TensorPtr out = Tensor::empty(lengths.sizes(), DType::kInt64, lengths.device());
  if (lengths.numel() == 0) return out;
  kernels::cuda::ScanJob job;
  job.lanes = lanes<2>(op, lengths.dim() - 1, {out.get(), &lengths});
  job.out = out->raw();
  job.input = lengths.raw();
  job.out_dtype = DType::kInt64;
  job.in_dtype = lengths.dtype();
  const std::size_t bytes = kernels::cuda::scan_scratch(job.lanes.rows.numel, job.lanes.n);
  const StorageRef scratch = bytes == 0 ? StorageRef() : on.scratch(bytes);
  on.launched(kernels::cuda::cumsum(job, bytes == 0 ? nullptr : scratch->data(), on.stream()));
  return out;
}

}  // namespace

// Unless `unsafe` says that the segments are right they are checked, which waits for the GPU. Wrong ones that were not
// checked are cut down to the axis.
UNTORCH_SHIM aoti_torch_cuda_segment_reduce(AtenTensorHandle data, const char* reduce_name, AtenTensorHandle* lengths,
                                            AtenTensorHandle* indices, AtenTensorHandle* offsets, std::int64_t axis_arg,
                                            std::int32_t unsafe, double* initial, AtenTensorHandle* ret0) {
  return guarded("segment_reduce", [&] {
    const char* op = "segment_reduce";
    const Tensor& t = cuda_input(data, op, "data");
    const Reduce reduce = parse_reduce(reduce_name, op);
    if (optional_cuda_input(indices, op, "indices") != nullptr) {
      throw_error(ErrorKind::kUnsupported, op,
                  ": argument 'indices' is not supported (nor by PyTorch); pass lengths or offsets");
    }
    const Tensor* given = optional_cuda_input(lengths, op, "lengths");
    const Tensor* bounds = optional_cuda_input(offsets, op, "offsets");
    check(given != nullptr || bounds != nullptr, op, ": either 'lengths' or 'offsets' is needed");
    const std::int64_t axis = normalize_dim(axis_arg, t.dim(), op);
    const bool by_offsets = bounds != nullptr;
    const Tensor& cuts = by_offsets ? *bounds : *given;
    const char* const name = by_offsets ? "offsets" : "lengths";
    check(t.dim() > 0 && cuts.dim() == axis + 1 &&
              std::equal(cuts.sizes().begin(), cuts.sizes().end() - 1, t.sizes().begin()),
          op, ": '", name, "' has shape ", to_string(cuts.sizes()), ", expected the first ", axis, " sizes of 'data' ",
          to_string(t.sizes()), " and one more");
    check(cuts.dtype() == DType::kInt64 || cuts.dtype() == DType::kInt32, op, ": '", name, "' is ",
          dtype_name(cuts.dtype()), ", expected int32 or int64");
    if (!is_floating(t.dtype())) {
      throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(t.dtype()),
                  " is not supported, expected a floating type");
    }
    const std::int64_t row = cuts.size(-1), segments = by_offsets ? row - 1 : row;
    check(segments >= 0, op, ": 'offsets' is empty");
    const OnDevice on(op, t, {&cuts});
    if (unsafe == 0) refuse_capture(on, op, "the segments are checked unless 'unsafe' is set");

    Dims shape = t.sizes();
    shape[static_cast<std::size_t>(axis)] = segments;
    kernels::cuda::SegmentJob job;
    for (std::int64_t d = 0; d < axis; ++d) job.outer *= t.size(d);
    for (std::int64_t d = axis + 1; d < t.dim(); ++d) job.inner *= t.size(d);
    TensorPtr out = Tensor::empty(shape, t.dtype(), t.device());
    const TensorPtr values = contiguous(t);
    const TensorPtr table = by_offsets ? to_dtype(cuts, DType::kInt64) : running_sums(on, cuts, op);
    job.data = values->raw();
    job.out = out->raw();
    job.dtype = t.dtype();
    job.cuts = table->data<std::int64_t>();
    job.offsets = by_offsets;
    job.extent = t.size(axis);
    job.segments = segments;
    job.reduce = kernel_reduce(reduce);
    job.has_initial = initial != nullptr;
    job.initial = initial == nullptr ? 0 : *initial;
    if (unsafe == 0) {
      const StorageRef flag = on.scratch(sizeof(std::int64_t));
      auto* const wrong = static_cast<std::int64_t*>(flag->data());
      cuda::check_driver(
          cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(wrong), 0, sizeof *wrong, on.stream()), op);
      on.launched(kernels::cuda::check_segments(job, wrong, on.stream()));
      std::int64_t seen = 0;
      read_back(on, op, wrong, &seen, 1);
      check(
          seen == 0, op, ": '", name, "' do not cut an axis of ", job.extent, " into segments",
          by_offsets ? " (each within the axis, none ending before it starts)" : " (none negative, the sum the axis)");
    }
    on.launched(kernels::cuda::segment_reduce(job, on.stream()));
    give(ret0, std::move(out), op);
  });
}
