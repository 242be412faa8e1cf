// Pinned host memory for copies that do not wait.
#pragma once

#include <cstddef>

#include "tensor/tensor.h"

namespace untorch::cuda {

// Kept for reuse once the GPU is done with it: the current stream is where it was last used. Throws kOutOfMemory.
StorageRef allocate_pinned(std::size_t nbytes, int device);

}  // namespace untorch::cuda
