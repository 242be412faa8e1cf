// Convolution forward: sizes, the fused epilogue, and the launchers of both devices.
//
// One and two spatial dimensions are three with leading sizes of 1. Sizes: input [n, groups*in, d, h, w], output
// [n, groups*out, d, h, w]. Both are row-major (channels first) or have the channel innermost (channels last).
#pragma once

#include <array>
#include <cstdint>

#include "kernels/launcher.h"

namespace untorch::kernels {

struct ConvolutionShape {
  std::int64_t batch, groups;
  std::int64_t in_channels, out_channels;  // of one group
  std::array<std::int64_t, 3> input, kernel, output, stride, padding, dilation;
  bool channels_last;

  std::int64_t input_size() const noexcept { return input[0] * input[1] * input[2]; }
  std::int64_t output_size() const noexcept { return output[0] * output[1] * output[2]; }
  std::int64_t kernel_size() const noexcept { return kernel[0] * kernel[1] * kernel[2]; }
};

// Strides in elements: batch, channel, then the three spatial dimensions.
struct ConvolutionStrides {
  std::int64_t at[5];
};

enum class FusedUnary : std::int8_t {
  kNone,
  kRelu,
  kSigmoid,
  kTanh,
  kSwish,
  kHardswish,
  kHardsigmoid,
  kHardtanh,   // clamped to [a, b]
  kLeakyRelu,  // slope a below 0
  kGelu,
  kGeluTanh
};
enum class FusedBinary : std::int8_t { kNone, kAdd, kSub, kMul, kDiv };

// y = activation(x ∘ other), elementwise over the convolution's result x.
struct ConvolutionEpilogue {
  FusedUnary activation = FusedUnary::kNone;
  double a = 0, b = 0;  // the activation's scalars
  FusedBinary binary = FusedBinary::kNone;

  bool empty() const noexcept { return activation == FusedUnary::kNone && binary == FusedBinary::kNone; }
};

// bias may be null everywhere.
namespace cpu {  // float32 and float64
// weight: [groups*out, in, kernel] when channels first, [groups*out, kernel, in] when channels last.
void convolution(const ConvolutionShape& shape, DType dtype, const void* input, const void* weight, const void* bias,
                 void* output);
// weight: [groups*in, out, kernel]; input and output are row-major (channels first).
void convolution_transposed(const ConvolutionShape& shape, DType dtype, const void* input, const void* weight,
                            const void* bias, void* output);
// One input channel a group. weight: [groups*out, kernel] when channels first, [kernel, groups*out] when last.
void convolution_depthwise(const ConvolutionShape& shape, DType dtype, const void* input, const void* weight,
                           const void* bias, void* output);
// `numel` elements of floating dtypes in place, in memory order; `other`, laid out like them, is read for a binary
// step alone.
void convolution_epilogue(const ConvolutionEpilogue& epilogue, DType dtype, std::int64_t numel, const void* other,
                          void* output);
}  // namespace cpu
namespace cuda {  // floating dtypes
// output[n, o, …] = bias[o] + sum of input · weight over the input channels of o's group and the kernel. Any strides
// for input and weight (its dimensions as PyTorch orders them); output is dense, row-major or channels last as the
// shape says. Sums run in float for the half types, in the dtype itself otherwise; the order of the sum is fixed.
int convolution_direct(const ConvolutionShape& shape, bool transposed, DType dtype, const void* input,
                       const ConvolutionStrides& input_strides, const void* weight,
                       const ConvolutionStrides& weight_strides, const void* bias, void* output, Stream stream);
// What the kernel reads of one image, [d, h, w, groups*in], for `count` output positions from `first` on:
// output[groups, count, kernel…, in]. Both are dense. The shape's batch is not read.
int convolution_columns(const ConvolutionShape& shape, DType dtype, const void* input, std::int64_t first,
                        std::int64_t count, void* output, Stream stream);
// Depthwise problems of row-major images, [n, c, h, w] with a weight [c, 1, k, k] of k = 3, 5 or 7, stride 1 or 2 and
// no dilation; kNoKernel for others. All tensors are dense.
bool serves_depthwise_rows(const ConvolutionShape& shape);
int convolution_depthwise_rows(const ConvolutionShape& shape, DType dtype, const void* input, const void* weight,
                               const void* bias, void* output, Stream stream);
// Depthwise problems of images and volumes in float32 and the half types; kNoKernel for others. The weight is
// [channels, kernel…], or [kernel…, channels] channels last. output = activation(convolution + bias + residual).
// Fastest channels last for kernels of 3, 5 and 7 squared with stride 1 or 2 and no dilation, and channels and pointers
// that are multiples of 8 bytes.
bool serves_depthwise(const ConvolutionShape& shape, DType dtype);
int convolution_depthwise(const ConvolutionShape& shape, DType dtype, const void* input, const void* weight,
                          const void* bias, const void* residual, const ConvolutionEpilogue& epilogue, void* output,
                          Stream stream);
// output[n, o, …] = activation(output + bias[o] + residual); bias and residual may be null, and the epilogue's binary
// step is not read. Output and residual are dense in the shape's format. Sums run in float for the half types and are
// rounded once.
int convolution_epilogue(const ConvolutionShape& shape, DType dtype, const void* bias, const void* residual,
                         const ConvolutionEpilogue& epilogue, void* output, Stream stream);
}  // namespace cuda

}  // namespace untorch::kernels
