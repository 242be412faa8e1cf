// What CUDA shims are written with.
//
//   UNTORCH_SHIM aoti_torch_cuda_cumsum(AtenTensorHandle self, std::int64_t dim, std::int32_t* dtype,
//                                       AtenTensorHandle* ret0) {
//     return guarded("cumsum", [&] {
//       const Tensor& t = cuda_input(self, "cumsum", "self");
//       const OnDevice on("cumsum", t);              // current device, the stream to launch on
//       TensorPtr out = Tensor::empty(t.sizes(), dtype, t.device());
//       on.launched(kernels::cuda::cumsum(…, on.stream()), "cumsum");
//       give(ret0, std::move(out), "cumsum");
//     });
//   }
#pragma once

#include "cuda/on_device.h"
#include "kernels/launcher.h"
#include "shims/broadcast.h"
#include "shims/layout.h"
#include "shims/promotion.h"
#include "shims/shim.h"
#include "tensor/device.h"
#include "tensor/iteration.h"

namespace untorch::shims {

// An optional tensor argument: null, or a pointer to null, means absent.
inline const Tensor* optional_cuda_input(AtenTensorHandle* handle, const char* op, const char* argument) {
  if (handle == nullptr || *handle == nullptr || !unwrap(*handle)->defined()) return nullptr;
  return &cuda_input(*handle, op, argument);
}

}  // namespace untorch::shims
