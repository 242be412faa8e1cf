// load(dequantize_weights=True): int4 and NVFP4 weights that are also kept dequantized on the GPU. One copy for each
// file and device, shared by all programs of the process that ask for it.
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

// Attaches the dequantized matrices to the packed weights' storages (Storage::dequantized), where shims find them, and
// waits until they are computed. The tensors belong to a container that is not published yet. `what` names the method
// in messages.
void dequantize_weights(const Archive& archive, std::span<const PackedWeight> packed, int device, const char* what);
// Bytes of this file's dequantized weights on the device.
std::uint64_t dequantized_bytes(const Archive& archive, int device);

}  // namespace untorch
