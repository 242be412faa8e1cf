// transformers::grouped_mm_fallback, by the front of _grouped_mm.
#include "shims/proxy_op.h"

using namespace untorch;
using namespace untorch::shims;

extern "C" {
AOTITorchError aoti_torch_cpu__grouped_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs,
                                          AtenTensorHandle* bias, std::int32_t* out_dtype, AtenTensorHandle* ret0);
AOTITorchError aoti_torch_cuda__grouped_mm(AtenTensorHandle self, AtenTensorHandle mat2, AtenTensorHandle* offs,
                                           AtenTensorHandle* bias, std::int32_t* out_dtype, AtenTensorHandle* ret0);
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
  AtenTensorHandle ends_handle = wrap(ends.get()), result = nullptr;
  const auto grouped = [&](auto* front) {
    return front(call.handle("input"), call.handle("weight"), &ends_handle, nullptr, nullptr, &result);
  };
  AOTITorchError code = 1;
  if constexpr (kHasCudaKernels) {
    code = op.on_cuda() ? grouped(aoti_torch_cuda__grouped_mm) : grouped(aoti_torch_cpu__grouped_mm);
  } else {
    code = grouped(aoti_torch_cpu__grouped_mm);
  }
  if (code != 0) throw_error(last_error_kind(), op, " runs ", last_error());
  call.give(0, TensorPtr(unwrap(result)));
}
