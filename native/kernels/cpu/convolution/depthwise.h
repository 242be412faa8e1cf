// Depthwise convolution's inner loops, chosen by instruction set.
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"

namespace untorch::kernels {

struct DepthwiseRow {
  std::int64_t taps, kernel_width, input_width, output_width, stride, padding, dilation;
};

}  // namespace untorch::kernels

// T is float or double.
// depthwise_row, channels first: out[x] = bias + sum of weights[tap][kx] * rows[tap][x*stride - padding + kx*dilation],
// reads outside of a row counting as 0.
// depthwise_pixel, channels last: out[c] = bias[c] + sum of weights[tap][c] * pixels[tap][c]; bias may be null.
UNTORCH_ISA_DECLARE(template <class T> void depthwise_row(const DepthwiseRow& row, const T* const* rows,
                                                          const T* const* weights, T bias, T* out);
                    template <class T>
                    void depthwise_pixel(std::int64_t channels, std::int64_t taps, const T* const* pixels,
                                         const T* const* weights, const T* bias, T* out);)
