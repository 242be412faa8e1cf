// The serial parts of the W8A8 convolution, one set for each instruction-set level (isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/w8a8/convolution.h"

namespace untorch::kernels {

// What every slice of one call shares. The input is uint8 by now, padded to whole words of four channels.
struct Int8ConvolutionCall {
  const Int8Convolution* problem;
  bool vnni;
  const std::uint8_t* input;
  std::int64_t batch_step, row_step, pixel_step, group_step;  // bytes
  // `taps` runs of `run` consecutive words each make the reduction: the kernel's elements or, of an input that was
  // padded beforehand, its rows.
  std::int64_t taps, run;
  // What differs between images of a dynamic range: their zero points and scales. A step of 0: all have the same.
  const std::uint8_t* zeros;  // as long as a pixel, what padding reads; [images]
  std::int64_t zeros_step;
  const std::int32_t* start;  // −zero · column sums: [images][padded outputs]
  const float* factor;        // input scale · weight scale [/ output scale], likewise
  std::int64_t channel_step;
  const float* bias;  // [padded outputs], in the units of the result
  const void* residual;
  void* output;
};

// The range of float32 values, with 0 in it.
struct FloatRange {
  float low = 0.0f, high = 0.0f;
  bool finite = true;
};

}  // namespace untorch::kernels

UNTORCH_ISA_DECLARE(
    // Widens a range by `count` values.
    void extend_range(const float* from, std::int64_t count, FloatRange& range);
    // to = clamp(round(from · inverse) + zero, 0, 255); NaN gives zero.
    void quantize_bytes(const float* from, std::int64_t count, float inverse, std::int32_t zero, std::uint8_t* to);
    // Pixels of the tallest tile.
    int int8_convolution_tile_rows(bool vnni);
    // Bytes of scratch that a slice of `tiles` tiles needs.
    std::int64_t int8_convolution_workspace(std::int64_t tiles, std::int64_t taps);
    // Tiles [tile0, tile1), groups [group0, group1), and of each of these the panels [panel0, panel1).
    void int8_convolution_slice(const Int8ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0,
                                std::int64_t tile1, std::int64_t group0, std::int64_t group1, std::int64_t panel0,
                                std::int64_t panel1, void* workspace);
    // The same by AMX, whose image has the input.
    void int8_convolution_amx_slice(const Int8ConvolutionCall& call, const AmxConvolution& amx, const AmxPart& part);
    // Output rows [row0, row1) of all images, all channels.
    void int8_depthwise_slice(const Int8ConvolutionCall& call, std::int64_t row0, std::int64_t row1);)
