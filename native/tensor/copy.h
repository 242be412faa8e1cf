// Strided copies with conversion between dtypes: on the CPU, and on any device.
#pragma once

#include "tensor/tensor.h"

namespace untorch {

// dst[i] = dtype(src[i]); src broadcasts to dst's shape. The two may not overlap unless they are the same view.
// Conversions are C++'s (float → integer truncates, complex → real drops the imaginary part), as in PyTorch.
void copy_cpu(const Tensor& dst, const Tensor& src);
// copy_cpu, or the device's copy when either tensor is on one.
void copy(const Tensor& dst, const Tensor& src);

// Bytes between any two memories, as they are.
void copy_bytes(void* dst, Device dst_device, const void* src, Device src_device, std::size_t nbytes);

// Results are on the source's device.
// A row-major copy with the same dtype.
TensorPtr clone_contiguous(const Tensor& src);
// Another handle on `src` when it is row-major already, else a row-major copy.
TensorPtr contiguous(const Tensor& src);
// A row-major tensor of another dtype; another handle on src when there is nothing to convert or move.
TensorPtr to_dtype(const Tensor& src, DType dtype);

}  // namespace untorch
