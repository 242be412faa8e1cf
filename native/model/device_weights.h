// Weights on GPUs, one copy a file, weight and device for all programs of the process.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "cuda/upload.h"
#include "model/archive.h"
#include "model/manifest.h"
#include "tensor/tensor.h"

namespace untorch {

// The weights of `indices` on the device: those that another program has there already, the others sent up together
// through `ring`. Kept as long as somebody holds one. Throws kOutOfMemory.
std::vector<StorageRef> device_weights(const Archive& archive, const Manifest& manifest,
                                       std::span<const std::size_t> indices, int device, cuda::UploadRing& ring);
// A private copy of one weight, for buffers that a model changes.
StorageRef private_device_weight(const Archive& archive, const Manifest& manifest, std::size_t index, int device);

}  // namespace untorch
