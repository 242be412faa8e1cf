// W8A8 convolution in NHWC on the CPU: int8 weights with a scale an output channel, uint8 activations with a scale and
// a zero point, sums in int32. Results are float32, or uint8 for the next layer.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cpu/convolution/packed.h"
#include "kernels/cpu/w8a8/int8.h"

namespace untorch::kernels {

// The largest kernel of a depthwise convolution.
inline constexpr std::int64_t kInt8DepthwiseTaps = 256;

// x ≈ scale · (u − zero). A scale of 0: the tensor is float32.
struct ByteScale {
  float scale;
  std::int32_t zero;  // 0 to 255
};

// Sizes as in PackedConvolution: input [batch, height, width, groups·in], output [batch, height, width, groups·out].
//
// The sum of a float32 result is S · (input.scale · scale) + bias, then residual and activation. A uint8 result with a
// clamp for activation (none, ReLU, ReLU6) is computed in its own steps:
//
//   t = S · (input.scale · scale / output.scale) + bias / output.scale [+ (r − residual.zero) · (residual.scale /
//   output.scale)];  u = clamp(round(clamp(t)) + zero, 0, 255)
//
// Multiplications and additions are rounded apart, so these bytes are the same on every CPU. Other activations are
// computed in float32, and the result is rounded to u = clamp(round(y · (1 / output.scale)) + zero, 0, 255). NaN
// becomes the least value.
struct Int8Convolution {
  std::int64_t batch, groups;
  std::int64_t in_channels, out_channels;  // of one group
  std::array<std::int64_t, 2> input, kernel, output, stride, padding, dilation;
  Epilogue epilogue;
  // [groups][ceil(out/16)][taps · ceil(in/4)][16][4]; of a depthwise convolution
  // [ceil(groups/16)][ceil(taps/4)][16][4], four taps in a word. Zeros behind out, in and taps.
  const std::int8_t* weight;
  const float* scale;               // an output channel, each group padded to 16
  const std::int32_t* column_sums;  // likewise: the sums of the weights
  const float* bias;                // [groups·out], or null
  // How a float32 input becomes uint8: by input_scale (kStatic), or by the range of each image, or of all (kTensor),
  // and 0. In static ranges NaN counts as 0; an image with a dynamic range that is not finite gives NaN.
  ActivationRange range;
  ByteScale input_scale;     // kStatic, and of a uint8 input; kTensor: the least scale
  ByteScale residual_scale;  // scale 0: the residual is float32
  ByteScale output_scale;    // scale 0: the output is float32

  bool depthwise() const noexcept { return in_channels == 1 && out_channels == 1 && groups > 1; }
  std::int64_t taps() const noexcept { return kernel[0] * kernel[1]; }
  // Words of four that a panel of the weight has.
  std::int64_t words() const noexcept;
  // Output channels with the padding.
  std::int64_t padded_outputs() const noexcept;
  // Bytes of the packed weight.
  std::int64_t weight_size() const noexcept;
};

// The input has a channel stride of 1, or a pixel stride of 1. The residual, which may be null, and the output are
// dense NHWC; the output overlaps neither. taps · in is at most kInt8MaxK. Throws std::bad_alloc. Neither the number of
// threads nor the other images of the batch change a result.
void int8_convolution(const Int8Convolution& p, const void* input, bool input_is_float, ImageStrides strides,
                      const void* residual, void* output);

}  // namespace untorch::kernels
