// The older C functions name no device (aoti_torch_mm_out and others). Given CUDA tensors they call what the
// CUDA shims put here when the library is loaded; in a build without them the entries stay null, and the CPU's function
// refuses the tensor.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

struct CudaOps {
  AOTITorchError (*mm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) = nullptr;
  AOTITorchError (*bmm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat2) = nullptr;
  AOTITorchError (*addmm_out)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle mat1, AtenTensorHandle mat2,
                              double beta, double alpha) = nullptr;
};
inline CudaOps cuda_ops;

inline bool on_cuda(AtenTensorHandle handle) noexcept {
  return handle != nullptr && unwrap(handle)->defined() && unwrap(handle)->device().type == DeviceType::kCUDA;
}

}  // namespace untorch::shims
