// Convolution forward on the CPU: im2col tiles and matrix products, a transposed form, and a direct depthwise form.
#pragma once

#include "kernels/convolution_shape.h"

namespace untorch::kernels {

// weight: [groups*out, in, kernel] when channels first, [groups*out, kernel, in] when channels last. bias may be null.
template <class T>
void convolution(const ConvolutionShape& shape, const T* input, const T* weight, const T* bias, T* output);

// weight: [groups*in, out, kernel]; input and output are row-major (channels first).
template <class T>
void convolution_transposed(const ConvolutionShape& shape, const T* input, const T* weight, const T* bias, T* output);

// One input channel a group. weight: [groups*out, kernel] when channels first, [kernel, groups*out] when last.
template <class T>
void convolution_depthwise(const ConvolutionShape& shape, const T* input, const T* weight, const T* bias, T* output);

}  // namespace untorch::kernels
