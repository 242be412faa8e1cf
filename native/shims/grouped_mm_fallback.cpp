// transformers::grouped_mm_fallback, by the front of untorch::moe_grouped_mm, whose result is contiguous as well.
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

extern "C" {
AOTITorchError aoti_torch_cpu_moe_grouped_mm(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle offs,
                                             AtenTensorHandle* ret0);
AOTITorchError aoti_torch_cuda_moe_grouped_mm(AtenTensorHandle input, AtenTensorHandle weight, AtenTensorHandle offs,
                                              AtenTensorHandle* ret0);
}

// Also takes int64 offsets. On a GPU nothing waits.
UNTORCH_PROXY_OP(grouped_mm_fallback, "transformers::grouped_mm_fallback", kBothDevices) {
  const Tensor &input = call.tensor("input"), &weight = call.tensor("weight"), &offs = call.tensor("offs");
  check(input.dim() == 2 && weight.dim() == 3 && offs.dim() == 1, op,
        ": expected 'input' [S, in], 'weight' [experts, in, out] and 'offs' [experts], got ", to_string(input.sizes()),
        ", ", to_string(weight.sizes()), " and ", to_string(offs.sizes()));
  check(offs.dtype() == DType::kInt32 || offs.dtype() == DType::kInt64, op, ": argument 'offs' is ",
        dtype_name(offs.dtype()), ", expected int32 or int64");
  const TensorPtr ends = to_dtype(offs, DType::kInt32);
  AtenTensorHandle result = nullptr;
  const auto grouped = [&](auto* front) {
    return front(call.handle("input"), call.handle("weight"), wrap(ends.get()), &result);
  };
  AOTITorchError code = 1;
  if constexpr (kHasCudaKernels) {
    code = op.on_cuda() ? grouped(aoti_torch_cuda_moe_grouped_mm) : grouped(aoti_torch_cpu_moe_grouped_mm);
  } else {
    code = grouped(aoti_torch_cpu_moe_grouped_mm);
  }
  if (code != 0) throw_error(last_error_kind(), op, " runs ", last_error());
  call.give(0, TensorPtr(unwrap(result)));
}
