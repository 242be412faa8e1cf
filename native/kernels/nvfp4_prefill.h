// How many rows are multiplied with an NVFP4 weight: what a caller may ask for, by the names of the argument `prefill`.
#pragma once

#include <cstdint>

namespace untorch::kernels {

enum class Nvfp4Prefill : std::int8_t { kExact, kFp8, kFp4 };

}  // namespace untorch::kernels
