// A caching allocator for host memory, 64-byte aligned.
#pragma once

#include <cstddef>

namespace untorch {

inline constexpr std::size_t kHostAlignment = 64;

// At least `nbytes` bytes in whole cache lines, uninitialised; null when out of memory. `capacity` is what
// free_host needs back.
void* allocate_host(std::size_t nbytes, std::size_t& capacity) noexcept;
void free_host(void* data, std::size_t capacity) noexcept;

}  // namespace untorch
