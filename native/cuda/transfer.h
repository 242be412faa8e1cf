// H2D and D2H copies of tensors, in the order of the device's current stream.
#pragma once

#include "tensor/tensor.h"

namespace untorch::cuda {

// A copy of a CPU tensor on the device, dense strides kept. The source may be changed when it returns; it does not wait
// for the stream, except for sources in pinned memory.
TensorPtr to_device(const Tensor& source, int device);
// Into existing memory of the same dtype and shape.
void to_device(const Tensor& destination, const Tensor& source);
// A copy on the CPU; synchronizes with the stream.
TensorPtr to_host(const Tensor& source);
// In pinned memory, without waiting: the values are there when the stream has passed this point.
TensorPtr to_host_async(const Tensor& source);

}  // namespace untorch::cuda
