// Depthwise convolution of images and volumes of any kernel, stride and dilation, row-major and channels last.
//
//   thread     one image, output row, channel (channels last two of a half type) and kColumns output columns, which lie
//              a dilation apart: each input pixel of their row is then loaded once for all of them
//   lanes      along the channels (channels last) or the columns
//   kTaps      kernel positions of a row whose loads are under way at a time
//
// Roofline: bytes = input + output, 2 operations a kernel position: bound by L1, which the window comes from. With a
// stride, and where there are few threads, kColumns is 1.
#include <algorithm>
#include <array>

#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/convolution/channel_words.cuh"
#include "kernels/cuda/convolution/depthwise.h"
#include "kernels/cuda/convolution/epilogue.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 128, kTaps = 4;

struct Problem {
  std::uint32_t threads, vectors, units;  // vectors of channels; units of columns in a row
  std::int32_t input[3], kernel[3], output[3], stride[3], padding[3], dilation[3];
  ConvolutionEpilogue epilogue;
};

// Neighbouring channels of a pixel: 4 bytes, or a single element.
template <class T, int kChannels>
__device__ __forceinline__ void load(const T* from, std::uint32_t at, float (&to)[kChannels]) {
  if constexpr (kChannels * sizeof(T) == 4) {
    unpack_word<T>(reinterpret_cast<const std::uint32_t*>(from)[at], to);
  } else {
    static_assert(kChannels == 1);
    to[0] = widen(from[at]);
  }
}

template <class T, int kChannels>
__device__ __forceinline__ void store(T* to, std::uint32_t at, const float (&from)[kChannels]) {
  if constexpr (kChannels * sizeof(T) == 4) {
    reinterpret_cast<std::uint32_t*>(to)[at] = pack_word<T>(from);
  } else {
    to[at] = narrow<T>(from[0]);
  }
}

// The kernel positions of a window from `start` that lie inside.
struct Range {
  std::int32_t first, end;
};

__device__ __forceinline__ Range range_of(const Problem& p, int d, std::int32_t start) {
  const std::int32_t by = p.dilation[d], inside = p.input[d] - start;
  return {start >= 0 ? 0 : (-start + by - 1) / by, inside <= 0 ? 0 : min(p.kernel[d], (inside + by - 1) / by)};
}

template <class T, int kChannels, int kColumns, bool kLast>
__global__ void __launch_bounds__(kThreads)
    depthwise(const __grid_constant__ Problem p, const T* __restrict__ input, const T* __restrict__ weight,
              const T* __restrict__ bias, const T* __restrict__ residual, T* __restrict__ output) {
  const std::uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.threads) return;
  std::uint32_t rest = index, vector = 0;
  const auto next = [&](std::uint32_t size) {
    const std::uint32_t quotient = rest / size, at = rest - quotient * size;
    rest = quotient;
    return at;
  };
  if constexpr (kLast) vector = next(p.vectors);
  const std::uint32_t unit = next(p.units), by = kColumns == 1 ? 1 : static_cast<std::uint32_t>(p.dilation[2]);
  const auto row = static_cast<std::int32_t>(next(p.output[1])), plane = static_cast<std::int32_t>(next(p.output[0]));
  if constexpr (!kLast) vector = next(p.vectors);
  const std::uint32_t first_column = unit / by * by * kColumns + unit % by;
  // Elements between the neighbours of a row, of input and output, and of the weight.
  const std::uint32_t step = kLast ? p.vectors : 1, image = kLast ? rest : rest * p.vectors + vector;
  const std::uint32_t from_channel = kLast ? vector : 0;
  const std::uint32_t from_weight = kLast ? vector : vector * p.kernel[0] * p.kernel[1] * p.kernel[2];

  const std::int32_t deep = plane * p.stride[0] - p.padding[0], top = row * p.stride[1] - p.padding[1];
  const std::int32_t left = static_cast<std::int32_t>(first_column) * p.stride[2] - p.padding[2];
  const Range planes = range_of(p, 0, deep), rows = range_of(p, 1, top), columns = range_of(p, 2, left);
  float sums[kColumns][kChannels] = {};
  for (int kd = planes.first; kd < planes.end; ++kd) {
    for (int kh = rows.first; kh < rows.end; ++kh) {
      const std::uint32_t line =
          ((image * p.input[0] + deep + kd * p.dilation[0]) * p.input[1] + top + kh * p.dilation[1]) * p.input[2];
      const std::uint32_t taps = (kd * p.kernel[1] + kh) * p.kernel[2];
      const auto load_factor = [&](int tap, float(&to)[kChannels]) {
        load<T>(weight, (taps + tap) * step + from_weight, to);
      };
      if constexpr (kColumns == 1) {
#pragma unroll 4
        for (int tap = columns.first; tap < columns.end; ++tap) {
          float pixel[kChannels], factor[kChannels];
          load<T>(input, (line + left + tap * p.dilation[2]) * step + from_channel, pixel);
          load_factor(tap, factor);
#pragma unroll
          for (int i = 0; i < kChannels; ++i) sums[0][i] += pixel[i] * factor[i];
        }
      } else {
        // The pixel that kernel position `tap` of the first column reads, and tap - j of the column j behind it.
        const auto load_pixel = [&](int tap, float(&to)[kChannels]) {
          const std::int32_t column = left + tap * p.dilation[2];
          if (column >= 0 && column < p.input[2]) {
            load<T>(input, (line + column) * step + from_channel, to);
          } else {
#pragma unroll
            for (int i = 0; i < kChannels; ++i) to[i] = 0;
          }
        };
        float window[kColumns - 1 + kTaps][kChannels] = {};
#pragma unroll
        for (int j = 0; j < kColumns - 1; ++j) load_pixel(j, window[j]);
        for (int tap = 0; tap < p.kernel[2]; tap += kTaps) {
          float factors[kTaps][kChannels];
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (tap + j >= p.kernel[2]) break;
            load_pixel(tap + kColumns - 1 + j, window[kColumns - 1 + j]);
            load_factor(tap + j, factors[j]);
          }
#pragma unroll
          for (int j = 0; j < kTaps; ++j) {
            if (tap + j >= p.kernel[2]) break;
#pragma unroll
            for (int column = 0; column < kColumns; ++column) {
#pragma unroll
              for (int i = 0; i < kChannels; ++i) sums[column][i] += window[column + j][i] * factors[j][i];
            }
          }
#pragma unroll
          for (int j = 0; j < kColumns - 1; ++j) {
#pragma unroll
            for (int i = 0; i < kChannels; ++i) window[j][i] = window[j + kTaps][i];
          }
        }
      }
    }
  }
  float added[kChannels] = {};
  if (bias != nullptr) load<T>(bias, vector, added);
  const std::uint32_t line = ((image * p.output[0] + plane) * p.output[1] + row) * p.output[2];
#pragma unroll
  for (int column = 0; column < kColumns; ++column) {
    const std::uint32_t at = first_column + column * by;
    if (at >= static_cast<std::uint32_t>(p.output[2])) break;
    float other[kChannels] = {};
    if (residual != nullptr) load<T>(residual, (line + at) * step + from_channel, other);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      sums[column][i] = activated(sums[column][i] + (added[i] + other[i]), p.epilogue);
    }
    store<T>(output, (line + at) * step + from_channel, sums[column]);
  }
}

int depthwise_any_size(const ConvolutionShape& s, DType dtype, const DepthwiseOperands& operands, bool words,
                       const ConvolutionEpilogue& epilogue, Stream stream) {
  Problem p{};
  for (std::size_t d = 0; d < 3; ++d) {
    p.input[d] = static_cast<std::int32_t>(s.input[d]);
    p.kernel[d] = static_cast<std::int32_t>(s.kernel[d]);
    p.output[d] = static_cast<std::int32_t>(s.output[d]);
    p.stride[d] = static_cast<std::int32_t>(s.stride[d]);
    p.padding[d] = static_cast<std::int32_t>(s.padding[d]);
    p.dilation[d] = static_cast<std::int32_t>(s.dilation[d]);
  }
  p.epilogue = epilogue;
  const auto launch = [&](auto type, auto channels, auto columns, auto last) -> int {
    using T = decltype(type);
    constexpr int kChannels = decltype(channels)::value, kColumns = decltype(columns)::value;
    depthwise<T, kChannels, kColumns, decltype(last)::value>
        <<<(p.threads + kThreads - 1) / kThreads, kThreads, 0, stream>>>(
            p, static_cast<const T*>(operands.input), static_cast<const T*>(operands.weight),
            static_cast<const T*>(operands.bias), static_cast<const T*>(operands.residual),
            static_cast<T*>(operands.output));
    return cudaGetLastError();
  };
  const auto of_columns = [&](auto type, auto channels, auto last) -> int {
    constexpr std::int64_t kManyThreads = 132 * 512, kColumns = 4;
    const std::int64_t vectors = s.groups / decltype(channels)::value, by = s.dilation[2];
    const std::int64_t lines = s.batch * s.output[0] * s.output[1];
    const std::int64_t units = (s.output[2] + kColumns * by - 1) / (kColumns * by) * by;
    const bool several = s.stride[2] == 1 && s.kernel[2] > 1 && lines * units * vectors >= kManyThreads;
    p.vectors = static_cast<std::uint32_t>(vectors);
    p.units = static_cast<std::uint32_t>(several ? units : s.output[2]);
    p.threads = static_cast<std::uint32_t>(lines) * p.units * p.vectors;
    if (p.threads == 0) return 0;
    return several ? launch(type, channels, std::integral_constant<int, kColumns>(), last)
                   : launch(type, channels, std::integral_constant<int, 1>(), last);
  };
  const auto of_layout = [&](auto type) -> int {
    constexpr int kPair = kPerWord<decltype(type)>;
    const std::integral_constant<int, 1> one;
    if (!s.channels_last) return of_columns(type, one, std::false_type());
    if (words) return of_columns(type, std::integral_constant<int, kPair>(), std::true_type());
    return of_columns(type, one, std::true_type());
  };
  if (dtype == DType::kFloat32) return of_layout(float());
  if (dtype == DType::kFloat16) return of_layout(__half());
  return of_layout(__nv_bfloat16());
}

}  // namespace

bool is_whole(const ConvolutionShape& s, DType dtype, std::size_t bytes, const DepthwiseOperands& operands) {
  const auto aligned = [&](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % bytes == 0; };
  return static_cast<std::size_t>(s.groups) * element_size(dtype) % bytes == 0 && aligned(operands.input) &&
         aligned(operands.weight) && aligned(operands.bias) && aligned(operands.residual) && aligned(operands.output);
}

bool serves_depthwise(const ConvolutionShape& s, DType dtype) {
  const bool made = dtype == DType::kFloat32 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  if (s.in_channels != 1 || s.out_channels != 1 || !made) return false;
  // Indices have 32 bits.
  constexpr std::int64_t kSide = 1 << 14, kMost = 1 << 30;
  bool small = s.groups <= kMost / kSide && s.batch <= kMost && s.kernel_size() * s.groups <= kMost;
  for (std::size_t d = 0; d < 3; ++d) {
    const std::int64_t most =
        std::max({s.input[d], s.output[d], s.padding[d], s.kernel[d], s.stride[d], s.dilation[d]});
    small = small && most <= kSide;
  }
  const auto fits = [&](const std::array<std::int64_t, 3>& sizes) {
    double elements = static_cast<double>(s.batch) * static_cast<double>(s.groups);
    for (const std::int64_t size : sizes) elements *= static_cast<double>(size);
    return elements <= static_cast<double>(kMost);
  };
  return small && fits(s.input) && fits(s.output);
}

int convolution_depthwise(const ConvolutionShape& s, DType dtype, const void* input, const void* weight,
                          const void* bias, const void* residual, const ConvolutionEpilogue& epilogue, void* output,
                          Stream stream) {
  if (!serves_depthwise(s, dtype)) return kNoKernel;
  const DepthwiseOperands operands{input, weight, bias, residual, output};
  const bool words = is_whole(s, dtype, 4, operands);
  if (s.channels_last && words && has_depthwise_channels_last(s)) {
    return depthwise_channels_last(s, dtype, operands, epilogue, stream);
  }
  return depthwise_any_size(s, dtype, operands, words, epilogue, stream);
}

}  // namespace untorch::kernels::cuda
