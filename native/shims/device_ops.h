// The older C functions name no device (aoti_torch_index_put_out and others). Given CUDA tensors they call what the
// CUDA shims put here when the library is loaded; in a build without them the entries stay null, and the CPU's function
// refuses the tensor.
#pragma once

#include "shims/shim.h"

namespace untorch::shims {

struct CudaOps {
  AOTITorchError (*index_put_out)(AtenTensorHandle out, AtenTensorHandle self, const AtenTensorHandle* indices,
                                  std::uint32_t num_indices, AtenTensorHandle values, bool accumulate) = nullptr;
  AOTITorchError (*scatter_out)(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim, AtenTensorHandle index,
                                AtenTensorHandle src) = nullptr;
  AOTITorchError (*scatter_reduce_out)(AtenTensorHandle out, AtenTensorHandle self, std::int64_t dim,
                                       AtenTensorHandle index, AtenTensorHandle src, const char* reduce,
                                       std::int32_t include_self) = nullptr;
  AOTITorchError (*embedding_bag)(AtenTensorHandle weight, AtenTensorHandle indices, AtenTensorHandle offsets,
                                  std::int64_t mode, AtenTensorHandle* per_sample_weights,
                                  std::int32_t include_last_offset, std::int64_t padding_idx, AtenTensorHandle* ret0,
                                  AtenTensorHandle* ret1, AtenTensorHandle* ret2, AtenTensorHandle* ret3) = nullptr;
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
