// Host memory to the device at bus speed.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "cuda/driver.h"

namespace untorch::cuda {

struct UploadPart {
  DevicePtr to;
  const void* from;
  std::size_t nbytes;
};

// Copies the parts, in any order, and returns when all have arrived. Large ones go through a ring of pinned buffers
// filled by several threads (reading the source, which may be a mapped file, is what takes the time); small ones go
// straight. Uses streams of its own.
void upload(std::span<const UploadPart> parts, int device);
void upload(DevicePtr to, const void* from, std::size_t nbytes, int device);

}  // namespace untorch::cuda
