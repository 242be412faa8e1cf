// segment_reduce.
#include "kernels/segment_reduce.h"

#include <algorithm>

#include "kernels/scan.h"
#include "shims/device_work.h"
#include "shims/reduce_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

// Where the segments end: the running sums of their lengths.
[[maybe_unused]] TensorPtr running_sums(const OnDevice& on, const Op& op, const Tensor& lengths) {
  TensorPtr out = Tensor::empty(lengths.sizes(), DType::kInt64, lengths.device());
  if (lengths.numel() == 0) return out;
  kernels::ScanParams params;
  params.lanes = lanes<2>(op, lengths.dim() - 1, {out.get(), &lengths});
  params.out = out->raw();
  params.input = lengths.raw();
  params.out_dtype = DType::kInt64;
  params.in_dtype = lengths.dtype();
  with_scratch(on, kernels::cuda::scan_scratch(params.lanes.rows.numel, params.lanes.n),
               [&](void* scratch) { return kernels::cuda::cumsum(params, scratch, on.stream()); });
  return out;
}

// Waits for the GPU.
[[maybe_unused]] void check_segments(const OnDevice& on, const Op& op, const kernels::SegmentParams& params) {
  const StorageRef flag = on.scratch(sizeof(std::int64_t));
  auto* const wrong = static_cast<std::int64_t*>(flag->data());
  cuda::check_driver(
      cuda::driver().memset_d8_async(reinterpret_cast<cuda::DevicePtr>(wrong), 0, sizeof *wrong, on.stream()), op);
  on.launched(kernels::cuda::check_segments(params, wrong, on.stream()));
  std::int64_t seen = 0;
  read_back(on, op, wrong, &seen, 1);
  check(
      seen == 0, op, ": '", params.offsets ? "offsets" : "lengths", "' do not cut an axis of ", params.extent,
      " into segments",
      params.offsets ? " (each within the axis, none ending before it starts)" : " (none negative, the sum the axis)");
}

}  // namespace

// On CUDA the segments are checked unless `unsafe` says that they are right, which waits for the GPU. Wrong ones that
// were not checked are cut down to the axis.
UNTORCH_OP(segment_reduce,
           (AtenTensorHandle data, const char* reduce_name, AtenTensorHandle* lengths, AtenTensorHandle* indices,
            AtenTensorHandle* offsets, std::int64_t axis_arg, std::int32_t unsafe, double* initial,
            AtenTensorHandle* ret0),
           data, reduce_name, lengths, indices, offsets, axis_arg, unsafe, initial, ret0) {
  const Tensor& t = op.input(data, "data");
  kernels::SegmentParams params;
  params.reduce = parse_reduce(reduce_name, op);
  if (op.optional_input(indices, "indices") != nullptr) {
    throw_error(ErrorKind::kUnsupported, op,
                ": argument 'indices' is not supported (nor by PyTorch); pass lengths or offsets");
  }
  const Tensor* given = op.optional_input(lengths, "lengths");
  const Tensor* bounds = op.optional_input(offsets, "offsets");
  check(given != nullptr || bounds != nullptr, op, ": either 'lengths' or 'offsets' is needed");
  const std::int64_t axis = normalize_dim(axis_arg, t.dim(), op);
  params.offsets = bounds != nullptr;
  const Tensor& cuts = params.offsets ? *bounds : *given;
  const char* const name = params.offsets ? "offsets" : "lengths";
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
  params.segments = cuts.size(-1) - (params.offsets ? 1 : 0);
  check(params.segments >= 0, op, ": 'offsets' is empty");
  params.dtype = t.dtype();
  params.extent = t.size(axis);
  for (std::int64_t d = 0; d < axis; ++d) params.outer *= t.size(d);
  for (std::int64_t d = axis + 1; d < t.dim(); ++d) params.inner *= t.size(d);
  params.has_initial = initial != nullptr;
  params.initial = initial == nullptr ? 0 : *initial;
  Dims shape = t.sizes();
  shape[static_cast<std::size_t>(axis)] = params.segments;
  TensorPtr out, values, table;
  const auto prepare = [&] {
    out = Tensor::empty(shape, t.dtype(), t.device());
    values = contiguous(t);
    params.out = out->raw();
    params.data = values->raw();
    params.cuts = table->data<std::int64_t>();
  };
  run(
      op, {&t, &cuts},
      [&] {
        table = to_dtype(cuts, DType::kInt64);
        prepare();
        kernels::cpu::segment_reduce(params, kernels::cpu::segment_starts(params));
      },
      [&](const auto& on) {
        if (unsafe == 0) refuse_capture(on, op, "the segments are checked unless 'unsafe' is set");
        table = params.offsets ? to_dtype(cuts, DType::kInt64) : running_sums(on, op, cuts);
        prepare();
        if (unsafe == 0) check_segments(on, op, params);
        return kernels::cuda::segment_reduce(params, on.stream());
      });
  give(ret0, std::move(out), op);
}
