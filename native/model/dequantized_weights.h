// Weights in four bits that a program keeps on the GPU as whole matrices, too: one copy a file and device for all
// programs of the process that ask for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/archive.h"
#include "model/manifest.h"
#include "tensor/tensor.h"

namespace untorch {

// A linear layer's weight as a container has it: its tensors in the operator's order, and their entries in the file.
struct PackedWeight {
  const PackedLinear* spec;
  std::vector<const Tensor*> tensors;
  std::vector<std::size_t> weights;
};

// Leaves the matrices beside the packed values (Storage::unpacked), where shims find them, and returns when they are
// made. The tensors are a container's that nobody else sees yet. `what` names the method in messages.
void dequantize_weights(const Archive& archive, std::span<const PackedWeight> packed, int device, const char* what);
// Bytes that matrices of this file take on the device.
std::uint64_t dequantized_bytes(const Archive& archive, int device);

}  // namespace untorch
