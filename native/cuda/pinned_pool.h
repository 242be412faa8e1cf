// A caching allocator for pinned host memory, for asynchronous copies.
#pragma once

#include <cstddef>

#include "tensor/tensor.h"

namespace untorch::cuda {

// Reused once the current stream has passed the point where it was freed. Throws kOutOfMemory.
StorageRef allocate_pinned(std::size_t nbytes, int device);

}  // namespace untorch::cuda
