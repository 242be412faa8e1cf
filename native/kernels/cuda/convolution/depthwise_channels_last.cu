// Depthwise convolution of channels-last images, with everything that follows it: a thread computes some neighbouring
// outputs of a row for a few channels.
//
//   thread      one image, output row, kColumns output columns, one vector of channels; lanes along the channels
//   window      (kColumns - 1) · stride + K input vectors of a row, each loaded once and used by all its outputs
//   weights     [kernel row, kernel column, channel]
//
// Roofline: bytes = input + output, 2 K² operations an output: bound by DRAM for large images, by latency for small
// ones. There threads are small, 4 bytes of channels and 2 columns, so that there are more of them. Activations are
// computed out of line where they are long: unrolled over a thread's outputs they would not fit the instruction cache.
#include <cuda_pipeline_primitives.h>

#include <cstdint>
#include <type_traits>

#include "kernels/convolution.h"
#include "kernels/cuda/common/device_types.cuh"
#include "kernels/cuda/convolution/channel_words.cuh"
#include "kernels/cuda/convolution/depthwise.h"
#include "kernels/cuda/convolution/epilogue.cuh"

namespace untorch::kernels::cuda {
namespace {

constexpr int kThreads = 128;

struct Pixels {
  std::uint32_t threads, vectors, tiles, out_height;  // vectors of channels; tiles of columns in a row
  std::int32_t height, width, out_width, pad_height, pad_width;
  ConvolutionEpilogue epilogue;
};

// Channels of a pixel, as they lie in memory.
template <int kWords>
struct alignas(kWords * 4) Words {
  std::uint32_t at[kWords];
};

template <class T, int kWords>
__device__ __forceinline__ void unpack(const Words<kWords>& words, float (&to)[kWords * kPerWord<T>]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) unpack_word<T>(words.at[i], to + i * kPerWord<T>);
}

__device__ __noinline__ float long_activation(float x, FusedUnary activation) {
  return activated(x, ConvolutionEpilogue{activation});
}

// The usual ones in a few instructions. One branch for all values.
template <int kCount>
__device__ __forceinline__ void activate(float (&x)[kCount], const ConvolutionEpilogue& epilogue) {
  const FusedUnary activation = epilogue.activation;
  if (activation == FusedUnary::kRelu || activation == FusedUnary::kHardtanh) {
    const bool clamps = activation == FusedUnary::kHardtanh;
    const float least = clamps ? static_cast<float>(epilogue.a) : 0.0f;
    const float most = clamps ? static_cast<float>(epilogue.b) : __int_as_float(0x7f800000);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = x[i] < least ? least : x[i] > most ? most : x[i];
  } else if (activation == FusedUnary::kSwish) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __fdividef(x[i], 1.0f + __expf(-x[i]));
  } else if (activation != FusedUnary::kNone) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = long_activation(x[i], activation);
  }
}

template <class T, int kKernel, int kStride, int kColumns, int kWords>
__global__ void __launch_bounds__(kThreads)
    depthwise(const __grid_constant__ Pixels p, const T* __restrict__ input, const T* __restrict__ weight,
              const T* __restrict__ bias, const T* __restrict__ residual, T* __restrict__ output) {
  using V = Words<kWords>;
  constexpr int kChannels = kWords * kPerWord<T>, kWindow = (kColumns - 1) * kStride + kKernel;
  const std::uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  if (index >= p.threads) return;
  const std::uint32_t vector = index % p.vectors, rest = index / p.vectors;
  const std::uint32_t tile = rest % p.tiles, line = rest / p.tiles;
  const std::uint32_t image = line / p.out_height, row = line % p.out_height;
  const int first_column = static_cast<int>(tile) * kColumns, left = first_column * kStride - p.pad_width;
  const int top = static_cast<int>(row) * kStride - p.pad_height;
  const auto* const x = reinterpret_cast<const V*>(input);
  const auto* const w = reinterpret_cast<const V*>(weight) + vector;
  float added[kChannels] = {};
  if (bias != nullptr) unpack<T>(reinterpret_cast<const V*>(bias)[vector], added);
  std::uint32_t inside = 0;  // a bit for each column of the window
#pragma unroll
  for (int c = 0; c < kWindow; ++c) {
    if (left + c >= 0 && left + c < p.width) inside |= 1u << c;
  }

  // A small thread asks for all its weights at once, past the registers: they come from DRAM, a row at a time would
  // wait for it K times.
  constexpr bool kStaged = kWords == 1;
  __shared__ V staged[kStaged ? kKernel * kKernel : 1][kStaged ? kThreads : 1];
  if constexpr (kStaged) {
#pragma unroll
    for (int tap = 0; tap < kKernel * kKernel; ++tap) {
      __pipeline_memcpy_async(&staged[tap][threadIdx.x], w + tap * p.vectors, sizeof(V));
    }
    __pipeline_commit();
  }
  float sums[kColumns][kChannels] = {};
  // Of the window's first pixel, which may lie before the image: offsets wrap, and are not read there.
  std::uint32_t from = ((image * p.height + top) * p.width + left) * p.vectors + vector;
#pragma unroll
  for (int kh = 0; kh < kKernel; ++kh, from += p.width * p.vectors) {
    const std::uint32_t readable = top + kh >= 0 && top + kh < p.height ? inside : 0;
    V pixels[kWindow];
    std::uint32_t next = from;
#pragma unroll
    for (int c = 0; c < kWindow; ++c, next += p.vectors) {
      pixels[c] = V{};
      if ((readable >> c & 1) != 0) pixels[c] = x[next];
    }
    if (kStaged && kh == 0) __pipeline_wait_prior(0);  // a thread reads what it copied itself
    float by[kKernel][kChannels];
#pragma unroll
    for (int kw = 0; kw < kKernel; ++kw) {
      const int tap = kh * kKernel + kw;
      unpack<T>(kStaged ? staged[kStaged ? tap : 0][kStaged ? threadIdx.x : 0] : w[tap * p.vectors], by[kw]);
    }
#pragma unroll
    for (int c = 0; c < kWindow; ++c) {
      float value[kChannels];
      unpack<T>(pixels[c], value);
#pragma unroll
      for (int out = 0; out < kColumns; ++out) {
        const int kw = c - out * kStride;
        if (kw < 0 || kw >= kKernel) continue;
#pragma unroll
        for (int i = 0; i < kChannels; ++i) sums[out][i] += value[i] * by[kw][i];
      }
    }
  }
  std::uint32_t at = (line * p.out_width + first_column) * p.vectors + vector;
#pragma unroll
  for (int out = 0; out < kColumns; ++out, at += p.vectors) {
    if (first_column + out >= p.out_width) break;
    float other[kChannels] = {};
    if (residual != nullptr) unpack<T>(reinterpret_cast<const V*>(residual)[at], other);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) sums[out][i] += added[i] + other[i];
    activate(sums[out], p.epilogue);
    V result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.at[i] = pack_word<T>(&sums[out][i * kPerWord<T>]);
    reinterpret_cast<V*>(output)[at] = result;
  }
}

}  // namespace

bool has_depthwise_channels_last(const ConvolutionShape& s) {
  const bool image = s.input[0] == 1 && s.kernel[0] == 1 && s.output[0] == 1;
  const bool square =
      s.kernel[1] == s.kernel[2] && s.stride[1] == s.stride[2] && s.dilation[1] == 1 && s.dilation[2] == 1;
  return image && square && (s.kernel[1] == 3 || s.kernel[1] == 5 || s.kernel[1] == 7) && s.stride[1] <= 2;
}

int depthwise_channels_last(const ConvolutionShape& s, DType dtype, const DepthwiseOperands& operands,
                            const ConvolutionEpilogue& epilogue, Stream stream) {
  const auto narrow = [](std::int64_t value) { return static_cast<std::int32_t>(value); };
  const auto vectors_of = [&](std::int64_t bytes) {
    return s.groups * static_cast<std::int64_t>(element_size(dtype)) / bytes;
  };
  const std::int64_t lines = s.batch * s.output[1];
  // Larger threads read less; smaller ones fill the GPU where there are few.
  constexpr std::int64_t kManyThreads = 132 * 1024;
  const bool large = is_whole(s, dtype, 8, operands) && lines * ((s.output[2] + 3) / 4) * vectors_of(8) >= kManyThreads;
  const std::int64_t vectors = vectors_of(large ? 8 : 4);
  const std::int64_t columns = large ? 4 : 2, tiles = (s.output[2] + columns - 1) / columns;
  const Pixels p{static_cast<std::uint32_t>(lines * tiles * vectors),
                 static_cast<std::uint32_t>(vectors),
                 static_cast<std::uint32_t>(tiles),
                 static_cast<std::uint32_t>(s.output[1]),
                 narrow(s.input[1]),
                 narrow(s.input[2]),
                 narrow(s.output[2]),
                 narrow(s.padding[1]),
                 narrow(s.padding[2]),
                 epilogue};
  const auto blocks = (p.threads + kThreads - 1) / kThreads;
  const auto of_type = [&](auto type) -> int {
    using T = decltype(type);
    const auto launch = [&](auto* run) {
      run<<<blocks, kThreads, 0, stream>>>(p, static_cast<const T*>(operands.input),
                                           static_cast<const T*>(operands.weight), static_cast<const T*>(operands.bias),
                                           static_cast<const T*>(operands.residual), static_cast<T*>(operands.output));
      return static_cast<int>(cudaGetLastError());
    };
    const auto of_size = [&](auto kernel, auto stride) {
      constexpr int kKernel = decltype(kernel)::value, kStride = decltype(stride)::value;
      return large ? launch(&depthwise<T, kKernel, kStride, 4, 2>) : launch(&depthwise<T, kKernel, kStride, 2, 1>);
    };
    const auto of_stride = [&](auto kernel) {
      return s.stride[1] == 1 ? of_size(kernel, std::integral_constant<int, 1>())
                              : of_size(kernel, std::integral_constant<int, 2>());
    };
    if (s.kernel[1] == 3) return of_stride(std::integral_constant<int, 3>());
    if (s.kernel[1] == 5) return of_stride(std::integral_constant<int, 5>());
    return of_stride(std::integral_constant<int, 7>());
  };
  if (dtype == DType::kFloat32) return of_type(float());
  if (dtype == DType::kFloat16) return of_type(__half());
  return of_type(__nv_bfloat16());
}

}  // namespace untorch::kernels::cuda
