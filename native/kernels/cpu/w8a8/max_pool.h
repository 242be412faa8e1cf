// Maximum pooling of uint8 images in NHWC: between int8 convolutions, where max of the bytes is the bytes of the max.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

// input [batch, height, width, channels] dense, output [batch, output, channels] dense. Padding is never the maximum.
struct ByteMaxPool {
  std::int64_t batch, channels;
  std::array<std::int64_t, 2> input, output, kernel, stride, padding, dilation;
  const std::uint8_t* x;
  std::uint8_t* out;
};

// Every window must reach into the image: padding is less than the kernel's reach. Throws std::bad_alloc.
void byte_max_pool(const ByteMaxPool& p);

}  // namespace untorch::kernels

// out = max over `count` rows of n bytes; count is at least 1.
UNTORCH_ISA_DECLARE(void max_bytes(const std::uint8_t* const* rows, std::int64_t count, std::int64_t n,
                                   std::uint8_t* out);)
