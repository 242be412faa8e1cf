// Strided copies with conversion between dtypes, and fills.
#pragma once

#include "base/strided.h"
#include "kernels/launcher.h"

namespace untorch::kernels::cuda {

// dst[i] = dtype(src[i]) over the space (operand 0: dst, operand 1: src), one launch. Conversions are PyTorch's.
int copy(const Strided<2>& space, void* dst, DType dst_dtype, const void* src, DType src_dtype, int element_bytes,
         Stream stream);
// dst[i] = value: the bytes of one element.
int fill(const Strided<1>& space, void* dst, const void* value, int element_bytes, Stream stream);

}  // namespace untorch::kernels::cuda
