// Division by a number that the host knows: a multiplication on the GPU.
#pragma once

#include <bit>
#include <cstdint>

namespace untorch::kernels::cuda {

// Of values below 2^31.
struct Divisor {
  std::uint32_t multiplier = 0, shift = 0;  // multiplier 0: the divisor is 1
};

// by: at least 1.
constexpr Divisor divisor(int by) {
  if (by == 1) return {};
  // 2^(31 + bits) / by, rounded up, is below 2^32, and more than exact enough for values below 2^31.
  const int bits = std::bit_width(static_cast<std::uint32_t>(by - 1));
  const std::uint64_t scale = std::uint64_t{1} << (31 + bits);
  return {.multiplier =
              static_cast<std::uint32_t>((scale + static_cast<std::uint64_t>(by) - 1) / static_cast<std::uint64_t>(by)),
          .shift = static_cast<std::uint32_t>(bits - 1)};
}

}  // namespace untorch::kernels::cuda
