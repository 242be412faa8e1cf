// A caching allocator for host memory, 64-byte aligned.
#pragma once

#include <cstddef>

#include "tensor/tensor.h"

namespace untorch {

inline constexpr std::size_t kHostAlignment = 64;

// At least `nbytes` bytes in whole cache lines, uninitialised; null when out of memory. `capacity` is what
// free_host needs back.
void* allocate_host(std::size_t nbytes, std::size_t& capacity) noexcept;
void free_host(void* data, std::size_t capacity) noexcept;
// Gives large blocks that are kept for later back to the system.
void trim_host_memory() noexcept;

// Row-major zeros on the CPU. From 1 MiB on they are pages of their own, which the system gives when they are touched.
TensorPtr zeros_on_demand(DimSpan sizes, DType dtype);

}  // namespace untorch
