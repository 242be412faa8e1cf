// 3×3 convolution in NHWC of groups of 4 or 8 channels, in and out; weights packed [channels/16][taps][in][16].
//
// A vector holds the output channels of whole groups. For each channel of a group the input's values are spread over
// the group's lanes by one shuffle, and each input column is spread once a kernel row for all sums that it belongs to:
//
//   for each kernel row
//     for each input column         1 load, `group` shuffles
//       for each channel of a group up to 3 multiply-adds
//
// The sums of up to 8 pixels stay in registers: bound by the FMA ports, no lane is idle. Columns come from a table of
// addresses, padding from a row of zeros; kernel rows outside of the image are skipped.
#include <cstdint>
#include <utility>

#include "kernels/cpu/convolution/packed_levels.h"
#include "kernels/cpu/gemm/gemm_epilogue.h"
#include "kernels/cpu/gemm/gemm_micro.h"

namespace untorch::kernels::UNTORCH_ISA {
namespace {

constexpr int P = kPanel<float>;
constexpr int kLane = kLanes<float>;
constexpr int kSide = 3;
constexpr int kLeastTile = 4, kMostTile = 8;  // output pixels; smaller tiles are computed pixel by pixel
constexpr int kMostColumns = 2 * (kMostTile - 1) + kSide;
using V = Vector<float>;
typedef std::int32_t Lanes __attribute__((vector_size(kVectorBytes)));

// Channels [first, last) of a tile of output pixels.
struct GroupTile {
  std::int64_t first, last;
  const float* const* columns;  // [kernel row][kMostColumns]: input pixels
  std::int64_t above, below;    // kernel rows [above, below) are inside of the image
  const float *weight, *bias;   // the bias may be null
  float* to;                    // the first output pixel
  std::int64_t ldc;
  float low, high;  // of the clamp at the end
};

// Which lane each lane of a group reads for a channel of it.
template <int kGroup, int kChannel, int... kAt>
constexpr Lanes lanes_of(std::integer_sequence<int, kAt...>) {
  return Lanes{(kAt / kGroup * kGroup + kChannel)...};
}

// The input's value of a channel of each group, in all lanes of the group. `from`: the pixel.
template <int kGroup, int kChannel>
[[gnu::always_inline]] inline V spread(const float* from, std::int64_t channel) {
  if constexpr (kLane >= kGroup) {
    return __builtin_shuffle(load(from + channel),
                             lanes_of<kGroup, kChannel>(std::make_integer_sequence<int, kLane>{}));
  } else {
    return V{} + from[channel / kGroup * kGroup + kChannel];
  }
}

// Adds one channel of each group of an input column to the sums that it belongs to.
template <int kGroup, int kStride, int kTile, int kChannel>
[[gnu::always_inline]] inline void add_channel(V (&sum)[kTile], const float* from, std::int64_t channel,
                                               const float* weight, int x) {
  const V in = spread<kGroup, kChannel>(from, channel);
#pragma GCC unroll 8
  for (int i = 0; i < kTile; ++i) {
    const int k = x - i * kStride;
    if (k >= 0 && k < kSide) sum[i] += in * load(weight + (k * kGroup + kChannel) * P);
  }
}

template <int kGroup, int kStride, int kTile>
[[gnu::noinline]] void slide(const GroupTile& t) {
  constexpr int kColumns = (kTile - 1) * kStride + kSide;
  constexpr std::int64_t kRow = kSide * kGroup * P;
  for (std::int64_t c = t.first; c < t.last; c += kLane) {
    const float* const weight = t.weight + c / P * kSide * kRow + c % P;
    V sum[kTile];
    const V start = t.bias == nullptr ? V{} : load(t.bias + c);
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) sum[i] = start;
    for (std::int64_t y = t.above; y < t.below; ++y) {
      const float* const* const columns = t.columns + y * kMostColumns;
#pragma GCC unroll 20
      for (int x = 0; x < kColumns; ++x) {
        [&]<int... kChannel>(std::integer_sequence<int, kChannel...>) __attribute__((always_inline)) {
          (add_channel<kGroup, kStride, kTile, kChannel>(sum, columns[x], c, weight + y * kRow, x), ...);
        }
        (std::make_integer_sequence<int, kGroup>{});
      }
    }
    if (t.low != -__builtin_inff()) {
      const V least = V{} + t.low, most = V{} + t.high;
#pragma GCC unroll 8
      for (int i = 0; i < kTile; ++i) sum[i] = vecmath::at_most(vecmath::at_least(sum[i], least), most);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) store(t.to + i * t.ldc + c, sum[i]);
  }
}

using SlideKernel = void (*)(const GroupTile&);

template <int kGroup, int kStride>
constexpr SlideKernel kByTile[] = {slide<kGroup, kStride, 1>, slide<kGroup, kStride, 4>, slide<kGroup, kStride, 5>,
                                   slide<kGroup, kStride, 6>, slide<kGroup, kStride, 7>, slide<kGroup, kStride, 8>};
constexpr const SlideKernel* kSlides[2][2] = {{kByTile<4, 1>, kByTile<4, 2>}, {kByTile<8, 1>, kByTile<8, 2>}};

}  // namespace

void small_groups_slice(const ConvolutionCall& call, std::int64_t row0, std::int64_t row1, std::int64_t channel0,
                        std::int64_t channel1) {
  const PackedConvolution& p = *call.problem;
  const std::int64_t channels = p.groups * p.out_channels, width = p.output[1], stride = p.stride[0];
  const std::int64_t tiles = (width + kMostTile - 1) / kMostTile;
  const SlideKernel* const kernels = kSlides[p.in_channels == 8][stride - 1];
  const TileEpilogue inside = tile_epilogue(p.epilogue, call.residual != nullptr);
  const bool rest = inside.rest || call.residual != nullptr;
  const float* columns[kSide * kMostColumns] = {};
  for (std::int64_t row = row0; row < row1; ++row) {
    const float* const image = call.input + row / p.output[0] * call.strides.batch;
    const std::int64_t top = row % p.output[0] * stride - p.padding[0];
    const std::int64_t above = top < 0 ? (-top < kSide ? -top : kSide) : 0;
    const std::int64_t below = p.input[0] - top < kSide ? p.input[0] - top : kSide;
    for (std::int64_t tile = 0; tile < tiles; ++tile) {
      const std::int64_t x0 = width * tile / tiles, count = width * (tile + 1) / tiles - x0;
      const std::int64_t left = x0 * stride - p.padding[1], span = (count - 1) * stride + kSide;
      for (std::int64_t y = above; y < below; ++y) {
        const float* const line = image + (top + y) * call.strides.row;
        for (std::int64_t x = 0; x < span; ++x) {
          const bool inside_image = left + x >= 0 && left + x < p.input[1];
          columns[y * kMostColumns + x] = inside_image ? line + (left + x) * call.strides.pixel : call.zeros;
        }
      }
      const std::int64_t at = (row * width + x0) * channels;
      GroupTile t{channel0,    channel1,  columns,          above,    below,
                  call.weight, call.bias, call.output + at, channels, rest ? -__builtin_inff() : inside.low,
                  inside.high};
      if (count >= kLeastTile) {
        kernels[count - kLeastTile + 1](t);
      } else {
        for (std::int64_t i = 0; i < count; ++i, t.columns += stride, t.to += channels) kernels[0](t);
      }
      if (rest) {
        const float* const added = call.residual == nullptr ? nullptr : call.residual + at + channel0;
        apply_epilogue(count, channel1 - channel0, p.epilogue, added, channels, call.output + at + channel0, channels);
      }
    }
  }
}

}  // namespace untorch::kernels::UNTORCH_ISA
