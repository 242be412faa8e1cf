// nvfp4_linear's argument `prefill`: the arithmetic of the GEMM at large M. exact: W4A16; fp8: W8A8; fp4: W4A4.
#pragma once

#include <cstdint>

namespace untorch::kernels {

enum class Nvfp4Prefill : std::int8_t { kExact, kFp8, kFp4 };

}  // namespace untorch::kernels
