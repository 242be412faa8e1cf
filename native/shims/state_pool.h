// Reads the arguments that operators over a state pool share.
#pragma once

#include "kernels/state_pool.h"
#include "shims/op.h"

namespace untorch::shims {

// The pool's tensors, dense for as long as this lives.
class StatePoolArguments {
 public:
  // states [slots, elements], float32, written in place; state_slots [sequences], cu_seqlens_q [sequences + 1] and
  // seqlens_k [sequences], all int32. `needed`: elements of the layer in a row.
  StatePoolArguments(const Op& op, AtenTensorHandle states, AtenTensorHandle state_slots, AtenTensorHandle cu_seqlens_q,
                     AtenTensorHandle seqlens_k, std::int64_t offset, std::int64_t needed, std::int64_t tokens) {
    const Tensor &rows = op.input(states, "states"), &slots = op.input(state_slots, "state_slots");
    const Tensor &ends = op.input(cu_seqlens_q, "cu_seqlens_q"), &lengths = op.input(seqlens_k, "seqlens_k");
    check(rows.dim() == 2 && rows.dtype() == DType::kFloat32, op,
          ": argument 'states' must be float32 [slots, elements], "
          "got ",
          dtype_name(rows.dtype()), " ", to_string(rows.sizes()));
    check(rows.size(1) <= 1 || rows.stride(1) == 1, op, ": argument 'states' must have dense rows");
    check(offset >= 0 && offset <= rows.size(1) && needed <= rows.size(1) - offset, op, ": the rows of 'states' have ",
          rows.size(1), " elements, and the layer needs ", needed, " from ", offset, " on");
    check(slots.dim() == 1, op, ": argument 'state_slots' must be [sequences], got shape ", to_string(slots.sizes()));
    const std::int64_t sequences = slots.size(0);
    for (const auto& [name, tensor, count] :
         {std::tuple{"state_slots", &slots, sequences}, std::tuple{"cu_seqlens_q", &ends, sequences + 1},
          std::tuple{"seqlens_k", &lengths, sequences}}) {
      check(tensor->dtype() == DType::kInt32, op, ": argument '", name, "' must be int32, got ",
            dtype_name(tensor->dtype()));
      check(tensor->sizes() == Dims{count}, op, ": argument '", name, "' must have shape ", to_string(Dims{count}),
            ", got ", to_string(tensor->sizes()));
    }
    slots_ = contiguous(slots), ends_ = contiguous(ends), lengths_ = contiguous(lengths);
    pool_ = {.states = static_cast<float*>(rows.raw()),
             .slots = rows.size(0),
             .row = rows.size(0) > 1 ? rows.stride(0) : rows.size(1),
             .offset = offset,
             .state_slots = slots_->data<std::int32_t>(),
             .cu_seqlens_q = ends_->data<std::int32_t>(),
             .seqlens_k = lengths_->data<std::int32_t>(),
             .sequences = sequences,
             .tokens = tokens};
    if (const kernels::StateFault fault = kernels::check_states(pool_); fault.argument != nullptr) {
      throw_error(ErrorKind::kInvalidArgument, op, ": argument '", fault.argument, "' has a wrong value at ",
                  fault.index, ": ", fault.value);
    }
  }

  const kernels::StatePool& pool() const { return pool_; }

 private:
  TensorPtr slots_, ends_, lengths_;
  kernels::StatePool pool_;
};

}  // namespace untorch::shims
