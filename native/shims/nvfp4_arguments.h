// Shared by the fronts of nvfp4_linear and nvfp4_moe.
#pragma once

#include <cstdint>

#include "shims/matmul_checks.h"

namespace untorch::shims {

inline constexpr std::int64_t kNvfp4Block = 16;  // weights of a block scale

inline const std::uint8_t* bytes_of(const Tensor& tensor) { return static_cast<const std::uint8_t*>(tensor.raw()); }

}  // namespace untorch::shims
