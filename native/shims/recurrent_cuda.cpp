// untorch's recurrent layers on CUDA: the steps of all directions of a layer, whose input's share of the gates a GEMM
// has computed. One persistent kernel, or a GEMM and an elementwise kernel a step.
#include <utility>

#include "kernels/rnn.h"
#include "shims/gemm_cuda.h"
#include "shims/recurrent.h"

namespace untorch::shims {
namespace {

using kernels::RecurrentCell;
using kernels::RecurrentPlan;
using kernels::RecurrentStates;
using kernels::RecurrentSteps;

struct Results {
  TensorPtr output = nullptr, hidden = nullptr, cell = nullptr;
};

// The states in `results` hold the first ones.
void run_step_by_step(const Op& op, const OnDevice& on, const RecurrentSteps& p, const Tensor& weight,
                      Results& results) {
  const std::int64_t gates = kernels::gates_of(p.cell) * p.hidden;
  const Dims sizes{p.directions, p.batch, p.hidden};
  const bool wide = p.dtype == DType::kFloat32;
  const bool lstm = p.cell == RecurrentCell::kLstm;
  // States add up rounding errors: they stay float32, and only the GEMM's operand is rounded.
  TensorPtr hidden = to_dtype(*results.hidden, DType::kFloat32), cell = to_dtype(*results.cell, DType::kFloat32);
  const TensorPtr operand = wide ? nullptr : clone_contiguous(*results.hidden);
  const TensorPtr shares = Tensor::empty(Dims{p.directions, p.batch, gates}, DType::kFloat32, on.device());
  const TensorPtr turned =
      weight.view(Dims{p.directions, p.hidden, gates}, Dims{gates * p.hidden, 1, p.hidden}, weight.storage_offset());
  const CudaGemm gemm = gemm_problem(*shares, wide ? *hidden : *operand, *turned, nullptr, 1.0, 0.0);
  for (std::int64_t step = 0; step < p.steps; ++step) {
    check_interrupt();
    gemm_cuda(op, on, gemm);
    const kernels::RecurrentUpdate update{.step = step,
                                          .hidden_gates = shares->data<float>(),
                                          .hidden_state = hidden->data<float>(),
                                          .cell = lstm ? cell->data<float>() : nullptr,
                                          .operand = wide ? nullptr : operand->raw()};
    on.launched(kernels::cuda::recurrent_update(p, update, on.stream()));
  }
  results.hidden = to_dtype(*hidden, p.dtype), results.cell = to_dtype(*cell, p.dtype);
}

}  // namespace

// input_gates [steps, batch, directions · gates · hidden], w_hidden [directions, gates · hidden, hidden], bias_hidden
// [directions, gates · hidden], hx and cx [directions, batch, hidden], of one dtype, float32, bfloat16 or float16;
// lengths [batch] int64. Gives the outputs [steps, batch, directions · hidden] and the last states; the cell state of
// cells that have none is empty.
UNTORCH_SHIM aoti_torch_cuda_recurrent_steps(AtenTensorHandle input_gates, AtenTensorHandle w_hidden,
                                             AtenTensorHandle* bias_hidden, AtenTensorHandle hx, AtenTensorHandle* cx,
                                             AtenTensorHandle* lengths, const char* cell, AtenTensorHandle* ret0,
                                             AtenTensorHandle* ret1, AtenTensorHandle* ret2) {
  constexpr Op op{"recurrent_steps", DeviceType::kCUDA};
  return guarded(op, [&] {
    check_interrupt();
    const Tensor &x = op.input(input_gates, "input_gates"), &w = op.input(w_hidden, "w_hidden"),
                 &h = op.input(hx, "hx");
    const Tensor *bias = op.optional_input(bias_hidden, "bias_hidden"), *c = op.optional_input(cx, "cx"),
                 *ends = op.optional_input(lengths, "lengths");
    RecurrentSteps p{.cell = cell_of(op, cell), .dtype = x.dtype()};
    if (p.dtype != DType::kFloat32 && p.dtype != DType::kBFloat16 && p.dtype != DType::kFloat16) {
      throw_error(ErrorKind::kUnsupported, op, ": argument 'input_gates' must be float32, bfloat16 or float16, got ",
                  dtype_name(p.dtype));
    }
    check(x.dim() == 3, op, ": argument 'input_gates' must be [steps, batch, directions * gates * hidden], got shape ",
          to_string(x.sizes()));
    check(h.dim() == 3 && (h.size(0) == 1 || h.size(0) == 2), op,
          ": argument 'hx' must be [directions, batch, hidden] with 1 or 2 directions, got shape ",
          to_string(h.sizes()));
    check_cell_state(op, p.cell, c);
    p.steps = x.size(0), p.batch = x.size(1), p.hidden = h.size(2), p.directions = static_cast<int>(h.size(0));
    const std::int64_t gates = kernels::gates_of(p.cell) * p.hidden;
    const Dims states{p.directions, p.batch, p.hidden};
    check_argument(op, "input_gates", &x, p.dtype, Dims{p.steps, p.batch, p.directions * gates});
    check_argument(op, "w_hidden", &w, p.dtype, Dims{p.directions, gates, p.hidden});
    check_argument(op, "bias_hidden", bias, p.dtype, Dims{p.directions, gates});
    check_argument(op, "hx", &h, p.dtype, states);
    check_argument(op, "cx", c, p.dtype, states);
    check_argument(op, "lengths", ends, DType::kInt64, Dims{p.batch});
    check(ret0 != nullptr && ret1 != nullptr && ret2 != nullptr, op, ": output pointer is null");
    const OnDevice on(op, x, {&w, bias, &h, c, ends});
    const auto dense = [](const Tensor* tensor) { return tensor == nullptr ? nullptr : contiguous(*tensor); };
    const TensorPtr rows = contiguous(x), weight = contiguous(w), offsets = dense(bias), limits = dense(ends);
    const TensorPtr first_hidden = contiguous(h), first_cell = dense(c);
    Results results{.output = Tensor::empty(Dims{p.steps, p.batch, p.directions * p.hidden}, p.dtype, on.device())};
    p.input_gates = rows->raw(), p.w_hidden = weight->raw(), p.output = results.output->raw();
    p.bias_hidden = offsets == nullptr ? nullptr : offsets->raw();
    p.lengths = limits == nullptr ? nullptr : limits->data<std::int64_t>();
    const cuda::DeviceProperties& gpu = on.properties();
    const bool empty = p.steps == 0 || p.states() == 0;
    const RecurrentPlan plan =
        empty ? RecurrentPlan{} : kernels::cuda::plan_recurrent_steps(p, gpu.num_sms, gpu.max_shared_per_block);
    if (plan.units > 0) {
      results.hidden = Tensor::empty(states, p.dtype, on.device());
      results.cell = Tensor::empty(c == nullptr ? Dims{0} : states, p.dtype, on.device());
      const StorageRef exchange = on.scratch(kernels::cuda::recurrent_exchange_bytes(p));
      const RecurrentStates places{.first_hidden = first_hidden->raw(),
                                   .first_cell = first_cell == nullptr ? nullptr : first_cell->raw(),
                                   .last_hidden = results.hidden->raw(),
                                   .last_cell = results.cell->raw()};
      on.launched(kernels::cuda::recurrent_steps(p, places, plan, exchange->data(), on.stream()));
    } else {
      results.hidden = clone_contiguous(h);
      results.cell = c == nullptr ? Tensor::empty(Dims{0}, p.dtype, on.device()) : clone_contiguous(*c);
      if (!empty) run_step_by_step(op, on, p, *weight, results);
    }
    give(ret0, std::move(results.output), op);
    give(ret1, std::move(results.hidden), op);
    give(ret2, std::move(results.cell), op);
  });
}

}  // namespace untorch::shims
