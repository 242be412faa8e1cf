// The serial parts of the packed convolution, one set for each instruction-set level (see isa.h).
#pragma once

#include <cstdint>

#include "kernels/cpu/common/isa.h"
#include "kernels/cpu/convolution/amx_lines.h"
#include "kernels/cpu/convolution/packed.h"

namespace untorch::kernels {

// float32; pairs of bfloat16 that are multiplied as they are, the input's being pairs, too; pairs that are widened.
enum class ConvolutionWeights { kFloat, kPairs, kWidened };

// What every slice of one call shares. With kPairs a pair counts as one channel and its memory as one float: in the
// problem, in strides, input, weight and run.
struct ConvolutionCall {
  const PackedConvolution* problem;
  const float* input;
  ImageStrides strides;  // channel is 1
  // `taps` runs of `run` consecutive floats each make the reduction: the kernel's elements or, of an input that was
  // padded beforehand, its rows.
  std::int64_t taps, run;
  const float *weight, *bias, *residual;
  float* output;
  const float* zeros;  // as long as a pixel; what padding reads
  ConvolutionWeights weights = ConvolutionWeights::kFloat;
};

// The tiles of output pixels: `lines` lines of `length` pixels, `per_line` tiles in each.
struct PixelTiles {
  std::int64_t lines, length, per_line;

  std::int64_t count() const noexcept { return lines * per_line; }
  std::int64_t first(std::int64_t tile) const noexcept {
    return tile / per_line * length + tile % per_line * length / per_line;
  }
  // Pixels of a tile.
  std::int64_t size(std::int64_t tile) const noexcept { return first(tile + 1) - first(tile); }
};

}  // namespace untorch::kernels

UNTORCH_ISA_DECLARE(
    // Pixels of the tallest tile.
    int convolution_tile_rows();
    // Bytes of scratch that a slice of `tiles` tiles needs.
    std::int64_t convolution_workspace(std::int64_t tiles, std::int64_t taps, ConvolutionWeights weights);
    // `pixels` runs of `count` neighbours in bfloat16, rounded to nearest; elements from run to run.
    void round_to_bf16(std::int64_t pixels, std::int64_t count, const float* from, std::int64_t from_step,
                       std::uint16_t* to, std::int64_t to_step);
    // A panel of pairs [pairs][16][2] as float32, [2·pairs][16].
    void widen_bf16_pairs(const std::uint32_t* from, std::int64_t pairs, float* to);
    // Tiles [tile0, tile1), groups [group0, group1), and of each of these the panels [panel0, panel1).
    void convolution_slice(const ConvolutionCall& call, const PixelTiles& tiles, std::int64_t tile0, std::int64_t tile1,
                           std::int64_t group0, std::int64_t group1, std::int64_t panel0, std::int64_t panel1,
                           void* workspace);
    // The same by AMX: with kPairs, whose input is the image.
    void convolution_amx_slice(const ConvolutionCall& call, const AmxConvolution& amx, const AmxPart& part);
    std::int64_t depthwise_workspace(std::int64_t taps);
    // Whether a slice takes some of the channels, a multiple of 16 of them but for the last ones.
    bool depthwise_by_channels(const PackedConvolution& problem);
    // Output rows [row0, row1) of all images; channels [channel0, channel1), or all of them.
    void depthwise_slice(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, std::int64_t channel0,
                         std::int64_t channel1, void* workspace);
    // The same for small groups, and a multiple of 16 channels.
    void small_groups_slice(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, std::int64_t channel0,
                            std::int64_t channel1);
    std::int64_t winograd_workspace(std::int64_t tiles, std::int64_t channels);
    // 2×2 output tiles [tile0, tile1), row by row of all images, all channels.
    void winograd_slice(const ConvolutionCall& call, std::int64_t tile0, std::int64_t tile1, void* workspace);)
