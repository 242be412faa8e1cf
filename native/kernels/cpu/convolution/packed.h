// Convolution of float32 in NHWC with weights that were packed at export, one and two spatial dimensions.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/cpu/gemm/gemm.h"

namespace untorch::kernels {

// Sizes: input [batch, height, width, groups·in], output [batch, height, width, groups·out]. Pairs are height, width.
struct PackedConvolution {
  std::int64_t batch, groups;
  std::int64_t in_channels, out_channels;  // of one group
  std::array<std::int64_t, 2> input, kernel, output, stride, padding, dilation;
  bool winograd;      // the weight is transformed: see serves_winograd()
  bool bf16;          // the weight is bfloat16, in pairs of channels: see serves_bf16()
  bool small_groups;  // panels of the weight hold several groups: see serves_small_groups()
  Epilogue epilogue;

  bool depthwise() const noexcept { return in_channels == 1 && out_channels == 1 && groups > 1; }
  std::int64_t taps() const noexcept { return kernel[0] * kernel[1]; }
  // Floats of one output channel's weights.
  std::int64_t reduction() const noexcept { return taps() * in_channels; }
};

// Elements between images, channels, rows and pixels of the input.
struct ImageStrides {
  std::int64_t batch, channel, row, pixel;
};

// Whether the Winograd kernel takes the problem: 3×3, stride 1, no dilation, no groups, multiples of 16 channels.
bool serves_winograd(const PackedConvolution& problem);

// Whether the kernels take a weight of bfloat16: an even number of channels, not depthwise, not Winograd.
bool serves_bf16(const PackedConvolution& problem);

// Whether the kernel for small groups takes the problem: 3×3, no dilation, stride 1 or 2, groups of 4 or 8 channels, in
// and out, a multiple of 16 channels in all.
bool serves_small_groups(const PackedConvolution& problem);

// Elements that the packed weight has: [groups][ceil(out/16)][kernel][in][16], zero-padded in the output channels; of
// small groups [groups·out/16][kernel][in][16]; of a depthwise convolution [ceil(groups/16)][kernel][16]; of a Winograd
// convolution [16][out/16][in][16]; of bfloat16 [groups][ceil(out/16)][kernel][in/2][16][2].
std::int64_t packed_convolution_size(const PackedConvolution& problem);

// Whether the kernel pads the input itself, which then may have any strides: few channels, a kernel that is wide.
bool pads_beforehand(const PackedConvolution& problem);

// output = epilogue(convolution(input, weight) + bias). bias [groups·out] and residual, laid out like the output, may
// be null. The output is dense NHWC and overlaps none of the others. The input's channel stride is 1 unless
// pads_beforehand(). The result does not depend on the number of threads. The weight is bfloat16 where problem.bf16:
// where cpu_has_amx() or cpu_has_fast_bf16() the input is then rounded to bfloat16, elsewhere the weight is widened;
// sums are float32.
void convolution_packed(const PackedConvolution& problem, const float* input, ImageStrides strides, const void* weight,
                        const float* bias, const float* residual, float* output);

}  // namespace untorch::kernels
