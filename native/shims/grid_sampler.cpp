// grid_sampler_3d: values of a volume at fractional positions.
#include "kernels/grid_sampler.h"

#include "shims/op.h"

using namespace untorch;
using namespace untorch::shims;

UNTORCH_OP(grid_sampler_3d,
           (AtenTensorHandle input_handle, AtenTensorHandle grid_handle, std::int64_t interpolation_mode,
            std::int64_t padding_mode, std::int32_t align_corners, AtenTensorHandle* ret0),
           input_handle, grid_handle, interpolation_mode, padding_mode, align_corners, ret0) {
  const Tensor &input = op.input(input_handle, "input"), &grid = op.input(grid_handle, "grid");
  check(input.dim() == 5, op, ": argument 'input' must be 5-D, got shape ", to_string(input.sizes()));
  check(grid.dim() == 5 && grid.size(4) == 3 && grid.size(0) == input.size(0), op,
        ": argument 'grid' must have shape [", input.size(0), ", d, h, w, 3], got ", to_string(grid.sizes()));
  check(grid.dtype() == input.dtype(), op, ": argument 'grid' must be ", dtype_name(input.dtype()), " like input, got ",
        dtype_name(grid.dtype()));
  if (!is_floating(input.dtype())) {
    throw_error(ErrorKind::kUnsupported, op, ": dtype ", dtype_name(input.dtype()),
                " is not supported, expected a floating type");
  }
  check(input.size(2) > 0 && input.size(3) > 0 && input.size(4) > 0, op,
        ": argument 'input' must not be empty but for the batch, got shape ", to_string(input.sizes()));
  if (interpolation_mode != 0 && interpolation_mode != 1) {
    throw_error(ErrorKind::kUnsupported, op,
                ": argument 'interpolation_mode' must be 0 (bilinear) or 1 (nearest), got ", interpolation_mode);
  }
  check(padding_mode >= 0 && padding_mode <= 2, op,
        ": argument 'padding_mode' must be 0 (zeros), 1 (border) or 2 (reflection), got ", padding_mode);
  op.check_same_device({&input, &grid});
  kernels::GridSample problem{};
  problem.batch = input.size(0);
  problem.channels = input.size(1);
  for (std::int64_t d = 0; d < 3; ++d) {
    problem.input[d] = input.size(2 + d);
    problem.output[d] = grid.size(1 + d);
    problem.grid_at[2 + d] = grid.stride(1 + d);
  }
  for (std::int64_t d = 0; d < 5; ++d) problem.in_at[d] = input.stride(d);
  problem.grid_at[0] = grid.stride(0);
  problem.grid_at[1] = grid.stride(4);
  problem.padding = static_cast<kernels::GridPadding>(padding_mode);
  problem.nearest = interpolation_mode == 1;
  problem.align_corners = align_corners != 0;

  TensorPtr out = Tensor::empty(Dims{input.size(0), input.size(1), grid.size(1), grid.size(2), grid.size(3)},
                                input.dtype(), input.device());
  run(
      op, {&input, &grid},
      [&] { kernels::cpu::grid_sample(problem, input.dtype(), input.raw(), grid.raw(), out->raw()); },
      [&](const auto& on) {
        return kernels::cuda::grid_sample(problem, input.dtype(), input.raw(), grid.raw(), out->raw(), on.stream());
      });
  give(ret0, std::move(out), op);
}
