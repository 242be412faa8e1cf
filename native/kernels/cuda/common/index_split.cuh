// Decomposition of a linear index in device code.
#pragma once

#include <cstdint>

namespace untorch::kernels::cuda {

// rest % size, leaving rest / size. `narrow`: both fit into 32 bits, where division is several times faster.
__device__ __forceinline__ std::int64_t split(std::int64_t& rest, std::int64_t size, bool narrow) {
  if (narrow) {
    const auto index = static_cast<std::uint32_t>(rest), by = static_cast<std::uint32_t>(size);
    const std::uint32_t quotient = index / by;
    rest = quotient;
    return index - quotient * by;
  }
  const std::int64_t quotient = rest / size, remainder = rest - quotient * size;
  rest = quotient;
  return remainder;
}

}  // namespace untorch::kernels::cuda
