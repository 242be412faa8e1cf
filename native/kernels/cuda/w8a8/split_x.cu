// Few rows of x as two or three rows of 8 bits each: WGMMA multiplies them with weights as they lie.
//
// A CTA finds the absmax of a row, and has a part of it, which it reads again, from L1.
#include "kernels/cuda/common/launch.cuh"
#include "kernels/cuda/quantize/e4m3_convert.cuh"
#include "kernels/cuda/quantize/row_absmax.cuh"
#include "kernels/cuda/w8a8/w8_values.cuh"
#include "kernels/cuda/w8a8/w8a8.h"

namespace untorch::kernels::cuda {
namespace {

constexpr float kInt16Max = 127.0f * 256.0f;

// The pieces of two values of x / scale: two bytes each, the first value's lower.
__device__ __forceinline__ void split(float first, float second, std::uint32_t (&pieces)[2]) {
  const int a = __float2int_rn(first), b = __float2int_rn(second);
  // Low bytes are signed: what is above 127 belongs to the next high one.
  const auto high = [](int whole) { return static_cast<std::uint32_t>(whole + 128) >> 8 & 0xffu; };
  pieces[0] = high(a) | high(b) << 8;
  pieces[1] = (static_cast<std::uint32_t>(a) & 0xffu) | (static_cast<std::uint32_t>(b) & 0xffu) << 8;
}
__device__ __forceinline__ void split(float first, float second, std::uint32_t (&pieces)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    float first_piece, second_piece;
    pieces[i] = e4m3_of_pair(first, second);
#if __CUDA_ARCH__ >= 890
    std::uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(pieces[i])));
    __half2 both;
    memcpy(&both, &halves, 4);
    first_piece = __low2float(both), second_piece = __high2float(both);
#else
    first_piece = weight_value<E4m3Weight>(pieces[i] & 0xffu), second_piece = weight_value<E4m3Weight>(pieces[i] >> 8);
#endif
    first = (first - first_piece) * kPieceFactorFp8, second = (second - second_piece) * kPieceFactorFp8;
  }
}

__device__ __forceinline__ float scale_of(float absmax, Int8Weight) { return absmax / kInt16Max; }
// So that absmax / scale is from 128 to 256: the rest of a rounding, 16 times, is at most 128.
__device__ __forceinline__ float scale_of(float absmax, E4m3Weight) {
  return __uint_as_float((__float_as_uint(absmax) & 0x7f800000u) - (7u << 23));
}

template <class T, class W>
__global__ void __launch_bounds__(kThreads) split_kernel(W8Gemm p, SplitRows to) {
  constexpr int kPieces = std::is_same_v<W, E4m3Weight> ? 3 : 2;
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const std::int64_t m = blockIdx.x;
  const T* const from = static_cast<const T*>(p.x) + m * p.x_stride;
  const RowAbsMax found = row_absmax(from, p.x_width);
  const float scale = scale_of(found.absmax, W{}), inverse = 1.0f / scale;
  if (threadIdx.x == 0 && blockIdx.y == 0) to.scales[m] = found.finite ? scale : __uint_as_float(0x7fc00000u);
  const std::int64_t thread = std::int64_t{blockIdx.y} * kThreads + threadIdx.x;
  for (std::int64_t k = thread * kStep; k < p.k; k += std::int64_t{gridDim.y} * kThreads * kStep) {
    std::uint32_t words[kPieces][2] = {};
    if (k < p.x_width) {
      float values[kStep];
      load_step(from + k, values);
#pragma unroll
      for (int i = 0; i < kStep; i += 2) {
        std::uint32_t pieces[kPieces];
        split(values[i] * inverse, values[i + 1] * inverse, pieces);
#pragma unroll
        for (int j = 0; j < kPieces; ++j) words[j][i / 4] |= pieces[j] << 8 * (i % 4);
      }
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      *reinterpret_cast<uint2*>(to.values + (j * kW8GemvMaxM + m) * p.k + k) = {words[j][0], words[j][1]};
    }
  }
}

}  // namespace

int w8_split_x(const W8Gemm& p, const SplitRows& to, Stream stream) {
  return dispatch_floating(p.dtype, [&](auto type) -> int {
    using T = typename decltype(type)::type;
    if constexpr (!is_half_type<T>) {
      return kNoKernel;
    } else {
      return dispatch_weight(p.weight_dtype, [&](auto weight) -> int {
        Launch how;
        how.blocks = dim3(static_cast<unsigned>(p.m), parts_of_row(p.m, p.k));
        how.threads = kThreads;
        how.pdl = p.pdl;
        return launch_kernel(split_kernel<T, decltype(weight)>, how, stream, p, to);
      });
    }
  });
}

}  // namespace untorch::kernels::cuda
