// torchvision's nms and poolings of regions, which models reach through the proxy executor.
#include "kernels/detection.h"

#include "kernels/sort.h"
#include "shims/device_work.h"
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

namespace {

void check_floating(const Op& op, const Tensor& t, const char* argument, bool bfloat16) {
  if (is_floating(t.dtype()) && (bfloat16 || t.dtype() != DType::kBFloat16)) return;
  throw_error(ErrorKind::kUnsupported, op, ": argument '", argument, "' is ", dtype_name(t.dtype()),
              ", expected float32, float64", bfloat16 ? ", bfloat16" : "", " or float16");
}

// The numbers of the scores, largest first; equal ones keep their order. What torch.sort(stable=True) gives.
TensorPtr ranking(const Op& op, const Tensor& scores) {
  TensorPtr values = Tensor::empty(scores.sizes(), scores.dtype(), scores.device()),
            order = Tensor::empty(scores.sizes(), DType::kInt64, scores.device());
  kernels::SortParams params;
  params.lanes = lanes<3>(op, 0, {values.get(), order.get(), &scores});
  params.values = values->raw();
  params.indices = order->data<std::int64_t>();
  params.input = scores.raw();
  params.dtype = scores.dtype();
  params.take = params.lanes.n;
  params.descending = true;
  run(
      op, {&scores}, [&] { kernels::cpu::sort(params); },
      [&](const auto& on) {
        std::size_t bytes = 0;
        on.launched(kernels::cuda::sort_scratch(params, bytes));
        with_scratch(on, bytes, [&](void* scratch) { return kernels::cuda::sort(params, scratch, on.stream()); });
      });
  return order;
}

}  // namespace

// Boxes are compared as torchvision's kernels of the same device do it, so that ties on the threshold fall alike. On
// the CPU half types are computed in float32.
UNTORCH_PROXY_OP(nms, "torchvision::nms", kBothDevices) {
  const Tensor &boxes = call.tensor("dets"), &scores = call.tensor("scores");
  const double threshold = call.number("iou_threshold");
  check(boxes.dim() == 2 && boxes.size(1) == 4, op, ": argument 'dets' must be [n, 4], got ", to_string(boxes.sizes()));
  check(scores.dim() == 1 && scores.size(0) == boxes.size(0), op, ": argument 'scores' must be [", boxes.size(0),
        "] as there are boxes, got ", to_string(scores.sizes()));
  check_floating(op, boxes, "dets", !op.on_cuda());
  check_floating(op, scores, "scores", true);
  op.check_same_device({&boxes, &scores});
  const std::int64_t n = boxes.size(0), one = 1;
  if (op.on_cuda() && n > kernels::cuda::kNmsMax) {
    throw_error(ErrorKind::kUnsupported, op, ": ", n, " boxes, expected at most ", kernels::cuda::kNmsMax);
  }
  TensorPtr kept = Tensor::empty(Dims{n + 1}, DType::kInt64, boxes.device());
  std::int64_t count = 0;
  const auto problem = [&](const Tensor& dense, const Tensor& order) {
    return kernels::Nms{dense.raw(), order.data<std::int64_t>(), n, dense.dtype(), threshold};
  };
  run(
      op, {&boxes, &scores},
      [&] {
        if (n == 0) return;
        const bool half = element_size(boxes.dtype()) == 2;
        const TensorPtr dense = half ? to_dtype(boxes, DType::kFloat32) : contiguous(boxes);
        count = kernels::cpu::nms(problem(*dense, *ranking(op, scores)), kept->data<std::int64_t>());
      },
      [&](const auto& on) {
        refuse_capture(on, op, "the size of the result depends on the data");
        if (n == 0) return;
        const TensorPtr dense = contiguous(boxes), order = ranking(op, scores);
        with_scratch(on, kernels::cuda::nms_scratch(n), [&](void* scratch) {
          return kernels::cuda::nms(problem(*dense, *order), scratch, kept->data<std::int64_t>(), on.stream());
        });
        read_back(on, op, kept->data<std::int64_t>() + n, &count, 1);
      });
  call.give(0, kept->view({&count, 1}, {&one, 1}, 0));
}

namespace {

// An image and regions of it: what the poolings take. Half types are computed in float32.
struct Pooling {
  Pooling(const Op& op, const ProxyCall& call)
      : input(call.tensor("input")),
        rois(call.tensor("rois")),
        rows(call.integer("pooled_height")),
        columns(call.integer("pooled_width")) {
    check(input.dim() == 4, op, ": argument 'input' must be [batch, channels, height, width], got ",
          to_string(input.sizes()));
    check(rois.dim() == 2 && rois.size(1) == 5, op, ": argument 'rois' must be [n, 5], got ", to_string(rois.sizes()));
    check(rows > 0 && columns > 0, op, ": the pooled size is ", rows, " × ", columns, ", expected 1 or more each");
    check_floating(op, input, "input", true);
    check(rois.dtype() == input.dtype(), op, ": argument 'rois' is ", dtype_name(rois.dtype()), ", expected ",
          dtype_name(input.dtype()), " as 'input'");
    const std::int64_t largest = std::int64_t{1} << 31;
    check(input.size(2) < largest && input.size(3) < largest, op, ": argument 'input' has ", input.size(2), " × ",
          input.size(3), " pixels, expected less than 2^31 a side");
    check(op.on_cuda() || rois.size(0) == 0 || (input.size(2) > 0 && input.size(3) > 0), op,
          ": argument 'input' has no pixels: ", to_string(input.sizes()));
    op.check_same_device({&input, &rois});
    p.batch = input.size(0), p.channels = input.size(1), p.height = input.size(2), p.width = input.size(3);
    p.regions = rois.size(0), p.pooled_height = rows, p.pooled_width = columns;
    p.spatial_scale = call.number("spatial_scale");
  }

  // Runs `pool`, which gives the number of a region whose image is not in the batch, on the CPU.
  template <class Pool>
  void run_on_cpu(const Op& op, Tensor& out, const Pool& pool) {
    const bool half = element_size(input.dtype()) == 2;
    const DType dtype = half ? DType::kFloat32 : input.dtype();
    const TensorPtr image = half ? to_dtype(input, dtype) : contiguous(input),
                    regions = half ? to_dtype(rois, dtype) : contiguous(rois);
    const TensorPtr wide = half ? Tensor::empty(out.sizes(), dtype, out.device()) : nullptr;
    p.input = image->raw(), p.rois = regions->raw(), p.out = half ? wide->raw() : out.raw();
    p.dtype = dtype;
    if (const std::int64_t stranger = pool(); stranger >= 0) {
      throw_error(ErrorKind::kInvalidArgument, op, ": region ", stranger,
                  " of argument 'rois' is of an image that is not among the ", p.batch, " of 'input'");
    }
    if (half) copy_cpu(out, *wide);
  }

  const Tensor &input, &rois;
  std::int64_t rows, columns;
  kernels::RoiAlign p;
};

// A pooling with a result of indices beside its values; with `ps` each bin has channels of its own.
template <class Pool>
void pool_with_indices(const Op& op, const ProxyCall& call, bool ps, const Pool& pool) {
  Pooling pooling(op, call);
  const std::int64_t bins = pooling.rows * pooling.columns;
  check(!ps || pooling.p.channels % bins == 0, op, ": argument 'input' has ", pooling.p.channels,
        " channels, expected a multiple of the ", bins, " bins");
  const Dims shape{pooling.p.regions, ps ? pooling.p.channels / bins : pooling.p.channels, pooling.rows,
                   pooling.columns};
  TensorPtr out = Tensor::empty(shape, pooling.input.dtype(), pooling.input.device()),
            index = Tensor::empty(shape, DType::kInt32, pooling.input.device());
  pooling.run_on_cpu(op, *out, [&] { return pool(kernels::RoiPool{pooling.p, index->data<std::int32_t>()}); });
  call.give(0, std::move(out));
  call.give(1, std::move(index));
}

}  // namespace

UNTORCH_PROXY_OP(roi_align, "torchvision::roi_align", kBothDevices) {
  Pooling pooling(op, call);
  const Tensor &input = pooling.input, &rois = pooling.rois;
  kernels::RoiAlign& p = pooling.p;
  p.sampling_ratio = call.integer("sampling_ratio");
  p.aligned = call.flag("aligned");
  TensorPtr out =
      Tensor::empty(Dims{p.regions, p.channels, p.pooled_height, p.pooled_width}, input.dtype(), input.device());
  run(
      op, {&input, &rois}, [&] { pooling.run_on_cpu(op, *out, [&] { return kernels::cpu::roi_align(p); }); },
      [&](const auto& on) {
        const TensorPtr image = contiguous(input), regions = contiguous(rois);
        p.input = image->raw(), p.rois = regions->raw(), p.out = out->raw();
        p.dtype = input.dtype();
        return kernels::cuda::roi_align(p, on.faults(), on.stream());
      });
  call.give(0, std::move(out));
}

UNTORCH_PROXY_OP(roi_pool, "torchvision::roi_pool", kOnCpu) {
  pool_with_indices(op, call, false, [](const kernels::RoiPool& p) { return kernels::cpu::roi_pool(p); });
}

UNTORCH_PROXY_OP(ps_roi_align, "torchvision::ps_roi_align", kOnCpu) {
  pool_with_indices(op, call, true, [&](kernels::RoiPool p) {
    p.regions.sampling_ratio = call.integer("sampling_ratio");
    return kernels::cpu::ps_roi_align(p);
  });
}

UNTORCH_PROXY_OP(ps_roi_pool, "torchvision::ps_roi_pool", kOnCpu) {
  pool_with_indices(op, call, true, [](const kernels::RoiPool& p) { return kernels::cpu::ps_roi_pool(p); });
}
