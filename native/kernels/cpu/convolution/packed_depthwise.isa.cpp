// Depthwise convolution in NHWC with packed weights [ceil(channels/16)][taps][16]: a few output pixels × 64 channels
// stay in registers while all taps pass.
//
// The input rows of a tile are addressed by a table [taps][pixels], padding by a row of zeros. About one load an FMA:
// bound by the load ports out of the L1, by the L2 for large images.
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int P = kPanel<float>;
constexpr int kLane = kLanes<float>;
constexpr int kVectors = kVectorBytes == 64 ? 4 : kVectorBytes == 32 ? 2 : 2;  // side by side
constexpr int kPixels = kVectorBytes == 64 ? 5 : 4;

// A vector of kSize floats at any address.
template <int kSize>
struct Piece {
  typedef float type __attribute__((vector_size(kSize * 4)));
  typedef float loose __attribute__((vector_size(kSize * 4), aligned(4), may_alias));
  static type load(const float* from) { return *reinterpret_cast<const loose*>(from); }
  static void store(float* to, type v) { *reinterpret_cast<loose*>(to) = v; }
};

// kCount pixels × kWide vectors of N channels from `channel` on.
template <int kCount, int kWide, int N>
[[gnu::always_inline]] inline void block(std::int64_t taps, const float* const* rows, const float* weight,
                                         std::int64_t channel, const float* bias, float* to, std::int64_t ldc) {
  using V = typename Piece<N>::type;
  const auto load = Piece<N>::load;
  const auto store = Piece<N>::store;
  V acc[kCount][kWide];
  const float* w[kWide];
#pragma GCC unroll 8
  for (int j = 0; j < kWide; ++j) {
    const std::int64_t c = channel + j * N;
    w[j] = weight + c / P * P * taps + c % P;
    const V start = bias == nullptr ? V{} : load(bias + c);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) acc[i][j] = start;
  }
  for (std::int64_t tap = 0; tap < taps; ++tap, rows += kPixels) {
    V by[kWide];
#pragma GCC unroll 8
    for (int j = 0; j < kWide; ++j) by[j] = load(w[j] + tap * P);
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      const float* const from = rows[i] + channel;
#pragma GCC unroll 8
      for (int j = 0; j < kWide; ++j) acc[i][j] += load(from + j * N) * by[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 8
    for (int j = 0; j < kWide; ++j) store(to + i * ldc + channel + j * N, acc[i][j]);
  }
}

// The channels that fill no vector.
void rest(std::int64_t count, std::int64_t taps, const float* const* rows, const float* weight, std::int64_t channel,
          std::int64_t channels, const float* bias, float* to, std::int64_t ldc) {
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t c = channel; c < channels; ++c) {
      const float* const w = weight + c / P * P * taps + c % P;
      float sum = bias == nullptr ? 0.0f : bias[c];
      for (std::int64_t tap = 0; tap < taps; ++tap) sum += rows[tap * kPixels + i][c] * w[tap * P];
      to[i * ldc + c] = sum;
    }
  }
}

template <int kCount>
[[gnu::noinline]] void pixels(std::int64_t channels, std::int64_t taps, const float* const* rows, const float* weight,
                              const float* bias, float* to, std::int64_t ldc) {
  std::int64_t c = 0;
  for (; c + kVectors * kLane <= channels; c += kVectors * kLane) {
    block<kCount, kVectors, kLane>(taps, rows, weight, c, bias, to, ldc);
  }
  for (; c + kLane <= channels; c += kLane) block<kCount, 1, kLane>(taps, rows, weight, c, bias, to, ldc);
  if constexpr (kLane > 8) {
    if (c + 8 <= channels) block<kCount, 1, 8>(taps, rows, weight, c, bias, to, ldc), c += 8;
  }
  if constexpr (kLane > 4) {
    if (c + 4 <= channels) block<kCount, 1, 4>(taps, rows, weight, c, bias, to, ldc), c += 4;
  }
  if (c < channels) rest(kCount, taps, rows, weight, c, channels, bias, to, ldc);
}

using PixelsKernel = void (*)(std::int64_t, std::int64_t, const float* const*, const float*, const float*, float*,
                              std::int64_t);
#if defined(__AVX512F__)
constexpr PixelsKernel kKernels[] = {pixels<1>, pixels<2>, pixels<3>, pixels<4>, pixels<5>};
#else
constexpr PixelsKernel kKernels[] = {pixels<1>, pixels<2>, pixels<3>, pixels<4>};
#endif
static_assert(sizeof kKernels / sizeof kKernels[0] == kPixels);

}  // namespace

std::int64_t depthwise_workspace(std::int64_t taps) {
  return taps * kPixels * static_cast<std::int64_t>(sizeof(const float*));
}

void depthwise_slice(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, void* workspace) {
  const PackedConvolution& p = *call.problem;
  const float** const table = static_cast<const float**>(workspace);
  const std::int64_t channels = p.groups, taps = p.taps(), width = p.output[1];
  const bool finish = p.epilogue.activation != Activation::kNone || call.residual != nullptr;
  const std::int64_t tiles = (width + kPixels - 1) / kPixels;
  for (std::int64_t row = row0; row < row1; ++row) {
    const float* const image = call.input + row / p.output[0] * call.strides.batch;
    const std::int64_t top = row % p.output[0] * p.stride[0] - p.padding[0];
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t x0 = width * tile / tiles, count = width * (tile + 1) / tiles - x0;
      const float** to = table;
      for (std::int64_t ky = 0; ky < p.kernel[0]; ++ky) {
        const std::int64_t iy = top + ky * p.dilation[0];
        const bool inside = iy >= 0 && iy < p.input[0];
        const float* const line = image + iy * call.strides.row;
        for (std::int64_t kx = 0; kx < p.kernel[1]; ++kx, to += kPixels) {
          std::int64_t ix = x0 * p.stride[1] - p.padding[1] + kx * p.dilation[1];
          for (std::int64_t i = 0; i < count; ++i, ix += p.stride[1]) {
            to[i] = inside && ix >= 0 && ix < p.input[1] ? line + ix * call.strides.pixel : call.zeros;
          }
        }
      }
      float* const out = call.output + (row * width + x0) * channels;
      kKernels[count - 1](channels, taps, table, call.weight, call.bias, out, channels);
      if (finish) {
        const float* const added = call.residual == nullptr ? nullptr : call.residual + (row * width + x0) * channels;
        apply_epilogue(1, count * channels, p.epilogue, added, 0, out, 0);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
