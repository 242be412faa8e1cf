// Depthwise convolution in NHWC with packed weights [ceil(channels/16)][taps][16].
//
// 3×3 and 5×5 kernels with stride 1 or 2 slide over an output row: the sums of up to 8 pixels × one or two vectors of
// channels stay in registers, each input pixel is loaded once a kernel row and added to every sum that it belongs to.
//
//   for each kernel row         K weights in registers
//     for each input column     1 load, up to K multiply-adds
//
// (7·stride + 2·K) loads for 8·K multiply-adds: bound by the FMA ports where the input is in the L1 or L2, by memory
// for large images. Tiles at the left and right edge take their columns from a table of addresses, padding from a row
// of zeros; kernel rows outside of the image are skipped. Blocks of channels, so that the kernel rows of all tiles fit
// into the L1, were slower: they read a few lines of every pixel.
//
// All other problems: a few pixels × 64 channels stay in registers while all taps pass, addressed by a table
// [taps][pixels]. About one load an FMA.
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

constexpr std::int64_t ceil_div(std::int64_t x, std::int64_t y) { return (x + y - 1) / y; }

// A vector of kSize floats at any address.
template <int kSize>
struct Piece {
  typedef float type __attribute__((vector_size(kSize * 4)));
  typedef float loose __attribute__((vector_size(kSize * 4), aligned(4), may_alias));
  static type load(const float* from) { return *reinterpret_cast<const loose*>(from); }
  static void store(float* to, type v) { *reinterpret_cast<loose*>(to) = v; }
};

constexpr int kMostSide = 5;                  // of the kernels that slide
constexpr int kLeastTile = 4, kMostTile = 8;  // output pixels
constexpr int kMostColumns = 2 * (kMostTile - 1) + kMostSide;

// Channels [first, last) of a tile of output pixels.
struct Slide {
  std::int64_t first, last;
  const float* const* columns;  // [kernel row][kMostColumns]: the pixels at an edge
  const float* image;           // else the first input pixel of kernel row 0
  std::int64_t row, pixel;      // elements between input rows and pixels
  std::int64_t above, below;    // kernel rows [above, below) are inside of the image
  const float *weight, *bias;   // the bias may be null
  float* to;                    // the first output pixel
  std::int64_t ldc;
  float low, high;  // of the clamp at the end
};

// kSide × kSide, kTile output pixels, kWide vectors of N channels side by side.
template <int kSide, int kStride, int kTile, int kWide, int N, bool kEdge>
[[gnu::noinline]] void slide(const Slide& s) {
  using V = typename Piece<N>::type;
  constexpr int kColumns = (kTile - 1) * kStride + kSide;
  const std::int64_t pixel = s.pixel;
  for (std::int64_t c = s.first; c < s.last; c += kWide * N) {
    V sum[kTile][kWide];
    const float* weight[kWide];
#pragma GCC unroll 2
    for (int v = 0; v < kWide; ++v) {
      const std::int64_t at = c + v * N;
      weight[v] = s.weight + at / P * P * kSide * kSide + at % P + s.above * kSide * P;
      const V start = s.bias == nullptr ? V{} : Piece<N>::load(s.bias + at);
#pragma GCC unroll 8
      for (int i = 0; i < kTile; ++i) sum[i][v] = start;
    }
    for (std::int64_t y = s.above; y < s.below; ++y) {
      V by[kSide][kWide];
#pragma GCC unroll 5
      for (int k = 0; k < kSide; ++k) {
#pragma GCC unroll 2
        for (int v = 0; v < kWide; ++v) by[k][v] = Piece<N>::load(weight[v] + k * P);
      }
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) weight[v] += kSide * P;
      const float* from = s.image + y * s.row + c;
      const float* const* const columns = s.columns + y * kMostColumns;
#pragma GCC unroll 20
      for (int x = 0; x < kColumns; ++x) {
        if constexpr (kEdge) from = columns[x] + c;
        V in[kWide];
#pragma GCC unroll 2
        for (int v = 0; v < kWide; ++v) in[v] = Piece<N>::load(from + v * N);
        if constexpr (!kEdge) from += pixel;
#pragma GCC unroll 8
        for (int i = 0; i < kTile; ++i) {
          const int k = x - i * kStride;
          if (k < 0 || k >= kSide) continue;
#pragma GCC unroll 2
          for (int v = 0; v < kWide; ++v) sum[i][v] += in[v] * by[k][v];
        }
      }
    }
    if (s.low != -__builtin_inff()) {
      const V least = V{} + s.low, most = V{} + s.high;
#pragma GCC unroll 8
      for (int i = 0; i < kTile; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kWide; ++v) sum[i][v] = vecmath::at_most(vecmath::at_least(sum[i][v], least), most);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
#pragma GCC unroll 2
      for (int v = 0; v < kWide; ++v) Piece<N>::store(s.to + i * s.ldc + c + v * N, sum[i][v]);
    }
  }
}

// Two vectors where there are 32 registers.
constexpr int kSlideWide = kVectorBytes == 64 ? 2 : 1;

using SlideKernel = void (*)(const Slide&);

// The kernels of one side and stride, by tile.
struct SlideTable {
  SlideKernel inside[kMostTile + 1] = {}, edge[kMostTile + 1] = {};
  // Of what is left where two vectors are too many: one, and half a one.
  SlideKernel one[kMostTile + 1] = {}, half[kMostTile + 1] = {};
};

template <int kSide, int kStride, int kTile>
constexpr void add_slides(SlideTable& table) {
  table.inside[kTile] = slide<kSide, kStride, kTile, kSlideWide, kLane, false>;
  table.edge[kTile] = slide<kSide, kStride, kTile, kSlideWide, kLane, true>;
  if constexpr (kVectorBytes == 64) {
    table.one[kTile] = slide<kSide, kStride, kTile, 1, kLane, true>;
    table.half[kTile] = slide<kSide, kStride, kTile, 1, kLane / 2, true>;
  }
  if constexpr (kTile < kMostTile) add_slides<kSide, kStride, kTile + 1>(table);
}
template <int kSide, int kStride>
constexpr SlideTable slides() {
  SlideTable table;
  add_slides<kSide, kStride, kLeastTile>(table);
  return table;
}
constexpr SlideTable kSlides[2][2] = {{slides<3, 1>(), slides<3, 2>()}, {slides<5, 1>(), slides<5, 2>()}};

// Whether the sliding kernels take the problem, for whole vectors or, of 16 lanes, halves.
bool slides_over(const PackedConvolution& p) {
  return p.kernel[0] == p.kernel[1] && (p.kernel[0] == 3 || p.kernel[0] == 5) && p.stride[0] == p.stride[1] &&
         p.stride[0] <= 2 && p.dilation[0] == 1 && p.dilation[1] == 1 && p.output[1] >= kLeastTile &&
         p.groups % (kLane < 8 ? kLane : 8) == 0;
}

void slide_tile(const SlideTable& table, std::int64_t tile, bool edge, Slide& s) {
  const std::int64_t last = s.last, wide = (last - s.first) / (kSlideWide * kLane) * (kSlideWide * kLane);
  s.last = s.first + wide;
  if (wide > 0) (edge ? table.edge : table.inside)[tile](s);
  if constexpr (kVectorBytes == 64) {
    s.first = s.last;
    if (s.first + kLane <= last) {
      s.last = s.first + kLane;
      table.one[tile](s);
      s.first = s.last;
    }
    s.last = last;
    if (s.first < last) table.half[tile](s);
  }
}

// Output rows [row0, row1) of channels [channel0, channel1).
void slide_rows(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, std::int64_t channel0,
                std::int64_t channel1) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t channels = p.groups, width = p.output[1], side = p.kernel[0], stride = p.stride[0];
  const std::int64_t tiles = ceil_div(width, kMostTile);
  const SlideTable& table = kSlides[side == 5][stride - 1];
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  const bool rest = inside.rest || call.residual != nullptr;
  const std::int64_t odd = (channel1 - channel0) % (kSlideWide * kLane);  // channels that the edge's kernels take
  const float* columns[kMostSide * kMostColumns] = {};
  for (std::int64_t row = row0; row < row1; ++row) {
    const float* const image = call.input + row / p.output[0] * call.strides.batch;
    const std::int64_t top = row % p.output[0] * stride - p.padding[0];
    const std::int64_t above = top < 0 ? -top : 0;
    const std::int64_t below = p.input[0] - top < side ? p.input[0] - top : side;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t x0 = width * tile / tiles, count = width * (tile + 1) / tiles - x0;
      const std::int64_t left = x0 * stride - p.padding[1], span = (count - 1) * stride + side;
      const bool edge = left < 0 || left + span > p.input[1];
      const float* const line = image + top * call.strides.row + left * call.strides.pixel;
      if (edge || odd != 0) {
        for (std::int64_t y = above; y < below; ++y) {
          const float** const to = columns + y * kMostColumns;
          for (std::int64_t x = 0; x < span; ++x) {
            const bool inside_image = left + x >= 0 && left + x < p.input[1];
            to[x] = inside_image ? line + y * call.strides.row + x * call.strides.pixel : call.zeros;
          }
        }
      }
      const std::int64_t at = (row * width + x0) * channels;
      Slide s{channel0,
              channel1,
              columns,
              line,
              call.strides.row,
              call.strides.pixel,
              above,
              below,
              call.weight,
              call.bias,
              call.output + at,
              channels,
              rest ? -__builtin_inff() : inside.low,
              inside.high};
      slide_tile(table, count, edge, s);
      if (rest) {
        const float* const added = call.residual == nullptr ? nullptr : call.residual + at + channel0;
        apply_epilogue(count, channel1 - channel0, p.epilogue, added, channels, s.to + channel0, channels);
      }
    }
  }
}

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

bool depthwise_by_channels(const PackedConvolution& problem) { return slides_over(problem); }

void depthwise_slice(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, std::int64_t channel0,
                     std::int64_t channel1, void* workspace) {
  const PackedConvolution& p = *call.problem;
  if (slides_over(p)) return slide_rows(call, row0, row1, channel0, channel1);
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
